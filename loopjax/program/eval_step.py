"""The evaluation step: scores of the examples of a batch."""

from typing import Any

from flax import nnx

from loopjax.loop import starts as starts_lib
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Output


def model_inputs(batch: Batch) -> dict[str, Any]:
  """The entries of a batch that are arguments of the model's `__call__`.

  Models that cannot separate documents reject tasks with "documents".
  """
  names = ("inputs", "documents")
  return {name: batch[name] for name in names if name in batch}


def eval_step(
  params: Any,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  score: Any,
  num_loops: int,
  kind: str,
  trace: tuple[str, ...] = (),
  starts: starts_lib.Starts | None = None,
) -> dict[str, Any]:
  """Every score of every example of the batch.

  Args:
    params: parameters or their average.
    batch: has "valid" bool [B] and "group/<grouping>" i32 [B] per grouping.
    graphdef: the model without its parameters.
    score: the task's `score`.
    num_loops: number of loops to run.
    kind: how the loop runs, see `loop.driver.run_loop`.
    trace: per-loop records that the score uses.
    starts: several starts, one of which answers; None for a forward pass.

  Returns:
    "scores": f32 [B], or (values, weights) f32 [B] each, by name; and the
    batch's "valid" and groups.
  """

  def run(keys: Array | None = None) -> tuple[Any, Output, dict[str, Any]]:
    model, read = nnx.merge(graphdef, params), model_inputs(batch)
    if starts and keys is not None:
      read |= starts_lib.begin(model, keys, starts)
    output = model(**read, num_loops=num_loops, kind=kind, trace=trace)
    if output.hidden is not None:  # No logits needed.
      tokens = token_losses.read_out(model, output.hidden, batch["targets"])
      output = output._replace(tokens=tokens)
    return model, output, {**score(output, batch), **output.stats}

  about = {
    name: array
    for name, array in batch.items()
    if name == "valid" or name.startswith("group/")
  }
  scores = starts_lib.values(run, batch, starts) if starts else run()[2]
  return {**about, "scores": scores}
