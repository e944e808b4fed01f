"""The evaluation step: scores of a batch, summed by group."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch


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
  group_sizes: tuple[tuple[str, int], ...],
  num_loops: int,
  kind: str,
  trace: tuple[str, ...] = (),
) -> dict[str, dict[str, Array]]:
  """Sums of every score over the batch's valid examples, by group.

  Args:
    params: parameters or their average.
    batch: has "valid" bool [B] and "group/<grouping>" i32 [B] per grouping.
    graphdef: the model without its parameters.
    score: the task's `score`.
    group_sizes: number of groups of each grouping.
    num_loops: number of loops to run.
    kind: how the loop runs, see `loop.driver.run_loop`.
    trace: per-loop records that the score uses.

  Returns:
    {"": ..., "<grouping>": ...}, each of {"count": f32 [G], "<score>": f32 [G,
    5]}. For values v with weights w (1 by default), the five are the sums of w,
    w v, w^2, w^2 v and w^2 v^2; G = 1 for "".
  """
  model = nnx.merge(graphdef, params)
  read = model_inputs(batch)
  output = model(**read, num_loops=num_loops, kind=kind, trace=trace)
  if output.hidden is not None:  # No logits needed.
    tokens = token_losses.read_out(model, output.hidden, batch["targets"])
    output = output._replace(tokens=tokens)
  values = {**score(output, batch), **output.stats}
  valid = batch["valid"].astype(jnp.float32)
  groups = {"": (jnp.zeros(valid.shape, jnp.int32), 1)}
  for grouping, size in group_sizes:
    groups[grouping] = (batch[f"group/{grouping}"], size)
  sums = {}
  for grouping, (ids, size) in groups.items():
    # Not matrix products, which may use fewer bits.
    by_group = functools.partial(
      jax.ops.segment_sum, segment_ids=ids, num_segments=size
    )
    sums[grouping] = {"count": by_group(valid)}
    for name, value in values.items():
      v, w = value if isinstance(value, tuple) else (value, valid)
      powers = jnp.stack([w, w * v, w**2, w**2 * v, w**2 * v**2], axis=1)
      sums[grouping][name] = by_group(powers * valid[:, None])
  return sums
