"""Accuracy after every loop, up to and beyond the trained depth."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.types import Array, Batch, Output


def accuracy_by_depth(
  evaluated: evaluated_lib.EvaluatedModel,
) -> dict[str, np.ndarray]:
  """Scores of head(g_k) for every k (UTM, section 5.2 and figure 7).

  Runs `eval.depth_factor` times the trained number of loops once, over
  `eval.depth_examples` examples; a forced stop, if the model has one, happens
  at the new last loop.

  Returns:
    See `scores_by_loop`; K = depth_factor * model.num_loops. If the task has
    several evaluation splits, "<split>/<score>" for each that has examples.
  """
  settings = evaluated.settings
  num_examples = settings.eval.depth_examples
  output = evaluated.forward(
    ("prediction",),
    num_loops=settings.eval.depth_factor * settings.model.num_loops,
    num_examples=num_examples,
  )
  batch = {
    name: value[:num_examples] for name, value in evaluated.batch.items()
  }
  prediction = output.trace["prediction"]
  score, vocab_size = settings.task_module.score, evaluated.spec.vocab_size
  if not evaluated.splits:
    return scores_by_loop(score, prediction, batch, vocab_size)
  result: dict[str, np.ndarray] = {}
  for index, split in enumerate(evaluated.splits):
    rows = np.flatnonzero(batch["group/split"] == index)
    if len(rows):
      part = {name: value[rows] for name, value in batch.items()}
      scores = scores_by_loop(score, prediction[:, rows], part, vocab_size)
      result |= {f"{split}/{name}": scores[name] for name in scores}
  return result


def scores_by_loop(
  score: Callable[[Output, Batch], dict[str, Array]],
  prediction: Array,
  batch: Batch,
  vocab_size: int,
) -> dict[str, np.ndarray]:
  """A task's scores if each loop's predictions were the answer.

  Args:
    score: the task's `score`; it receives the predictions as one-hot logits.
    prediction: token ids, int [K, B, T].
    batch: the B examples.
    vocab_size: V.

  Returns:
    "<score>" and "<score>/standard_error", f64 [K], entry k after k + 1 loops.
    "loss" is omitted, as a one-hot prediction has none.
  """

  def score_one(prediction):
    logits = jax.nn.one_hot(prediction, vocab_size)
    values = score(Output(logits, {}, {}, {}, {}), batch)
    values.pop("loss", None)
    return values

  scores = jax.jit(lambda p: jax.lax.map(score_one, p))(jnp.asarray(prediction))
  result = {}
  for name, value in scores.items():
    value = np.asarray(value, np.float64)
    result[name] = value.mean(axis=1)
    result[f"{name}/standard_error"] = value.std(axis=1) / value.shape[1] ** 0.5
  return result
