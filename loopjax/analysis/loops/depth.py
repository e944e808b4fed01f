"""Scores after every loop, up to and beyond the trained depth."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.models import every_loop
from loopjax.program import eval_step
from loopjax.types import Array, Batch, Output, TokenScores

# Values and weights of each row after each loop, [K, B] each.
Scores = dict[str, tuple[Any, Any]]


def scores_by_depth(
  evaluated: evaluated_lib.EvaluatedModel,
) -> dict[str, np.ndarray]:
  """Scores of head(g_k) for every k (UTM, section 5.2 and figure 7).

  Over `eval.depth_examples` examples, up to `eval.depth_factor` times the
  trained number of loops. Models that read out every loop run once; a forced
  stop, if the model has one, moves to the new last loop. Other causal models
  run again for 1, 2, 4, ... loops.

  Returns:
    "<score>" and "<score>/standard_error", f64 [K], entry k after k + 1 loops,
    NaN for loops that were not run; K = depth_factor * model.num_loops. Causal
    models that read out every loop also have the state's, of
    `every_loop.STATE`; and the family's `measures`. If the task has several
    evaluation splits, "<split>/<score>" for each that has examples.
  """
  settings, family = evaluated.settings, evaluated.settings.family
  num_examples = settings.eval.depth_examples or None
  batch = {name: x[:num_examples] for name, x in evaluated.batch.items()}
  trained = settings.model.num_loops
  num_loops = settings.eval.depth_factor * trained
  reads_out = family.reads_out_every_loop
  if reads_out and reads_out(settings.model):
    found = _run(evaluated, batch, num_loops, every=True)
  elif family.reading:
    found = _by_runs(evaluated, batch, num_loops)
  else:
    output = evaluated.forward(
      ("prediction",), num_loops=num_loops, num_examples=num_examples
    )
    found = scores_by_loop(
      settings.task_module.score,
      output.trace["prediction"],
      batch,
      evaluated.spec.vocab_size,
    )
  result: dict[str, np.ndarray] = {}
  parts: dict[str, Any] = {"": slice(None)}
  if evaluated.splits:
    parts = {
      f"{split}/": np.flatnonzero(batch["group/split"] == index)
      for index, split in enumerate(evaluated.splits)
    }
  for prefix, rows in parts.items():
    of_rows = means(found, rows)
    result |= {f"{prefix}{name}": x for name, x in of_rows.items()}
  if family.measures:
    model = nnx.merge(evaluated.graphdef, evaluated.params)
    measured = jax.device_get(family.measures(model))
    result |= jax.tree.map(np.float64, measured)
  return result


def scores_by_loop(
  score: Callable[[Output, Batch], dict[str, Any]],
  prediction: Array,
  batch: Batch,
  vocab_size: int,
  losses: Array | None = None,
) -> Scores:
  """A task's scores with each loop's predictions as the answer.

  Args:
    score: the task's `score`; it receives the predictions as one-hot logits.
    prediction: token ids, int [K, B, T].
    batch: the B examples.
    vocab_size: V.
    losses: f32 [K, B, T], nats; without them there is no "loss", which one-hot
      predictions lack.
  """

  def score_one(of_loop: tuple[Array, Array | None]) -> dict[str, Any]:
    prediction, losses = of_loop
    logits = jax.nn.one_hot(prediction, vocab_size)
    tokens = None if losses is None else TokenScores(losses, prediction)
    values = score(Output(logits, {}, {}, {}, {}, tokens=tokens), batch)
    if losses is None:
      values.pop("loss", None)
    return {
      name: x if isinstance(x, tuple) else (x, jnp.ones_like(x))
      for name, x in values.items()
    }

  each = jnp.asarray(prediction), losses
  return jax.jit(lambda each: jax.lax.map(score_one, each))(each)


def means(found: Scores, rows: Any = slice(None)) -> dict[str, np.ndarray]:
  """Weighted means and standard errors over rows, f64 [K], as in evaluations.

  Args:
    found: values and weights of all rows.
    rows: mask of the rows to use; no scores if it is empty.
  """
  result: dict[str, np.ndarray] = {}
  for name, both in found.items():
    values, weights = (np.asarray(x, np.float64)[:, rows] for x in both)
    if not values.shape[1]:
      continue
    total = np.maximum(weights.sum(axis=1), 1e-9)
    mean = (weights * values).sum(axis=1) / total
    off = weights * (values - mean[:, None])
    result[name] = mean
    result[f"{name}/standard_error"] = np.sqrt((off**2).sum(axis=1)) / total
  return result


def _by_runs(
  evaluated: evaluated_lib.EvaluatedModel, batch: Batch, num_loops: int
) -> Scores:
  """Scores of runs with 1, 2, 4, ... loops, the trained number and the most."""
  trained = evaluated.settings.model.num_loops
  powers = [2**n for n in range(num_loops.bit_length())]
  counts = sorted({*powers, trained, num_loops})
  runs = [_run(evaluated, batch, loops, every=False) for loops in counts]
  at = np.subtract(counts, 1)

  def placed(*rows: np.ndarray) -> np.ndarray:
    whole = np.full((num_loops, rows[0].shape[1]), np.nan)
    whole[at] = np.concatenate(rows)
    return whole

  return jax.tree.map(placed, *runs)


def _run(
  evaluated: evaluated_lib.EvaluatedModel,
  batch: Batch,
  num_loops: int,
  *,
  every: bool,
) -> Scores:
  """Scores of one run, after every loop or only after its last."""
  settings, device = evaluated.settings, jax.local_devices()[0]
  run = jax.jit(
    functools.partial(
      _of_rows,
      graphdef=evaluated.graphdef,
      score=settings.task_module.score,
      num_loops=num_loops,
      every=every,
    )
  )
  num_rows = len(batch["inputs"])
  size = min(settings.eval.batch_size, num_rows)
  chunks = []
  for start in range(0, num_rows, size):
    there = (start + np.arange(size)) % num_rows  # One program for all chunks.
    chunk = {name: x[there] for name, x in batch.items()}
    found = run(evaluated.params, jax.device_put(chunk, device))
    chunks.append(jax.device_get(found))
  return jax.tree.map(
    lambda *parts: np.concatenate(parts, axis=1)[:, :num_rows], *chunks
  )


def _of_rows(
  params: Any,
  batch: Mapping[str, Array],
  *,
  graphdef: nnx.GraphDef,
  score: Callable[[Output, Batch], dict[str, Any]],
  num_loops: int,
  every: bool,
) -> Scores:
  """`scores_by_loop` of rows, and the state's."""
  model: Any = nnx.merge(graphdef, params)
  inputs = eval_step.model_inputs(batch)
  state: Scores = {}
  if every:
    trace = model(**inputs, num_loops=num_loops, targets=batch["targets"]).trace
    losses, prediction = trace["loss"], trace["prediction"]
    ones = jnp.ones(losses.shape[:2])
    state = {name: (trace[name], ones) for name in every_loop.STATE}
  else:
    output = model(**inputs, num_loops=num_loops)
    found = eval_step.read_out(model, output.hidden, batch)
    losses, prediction = (x[None] for x in found)
  vocab_size = model.spec.vocab_size
  return {
    **scores_by_loop(score, prediction, batch, vocab_size, losses),
    **state,
  }
