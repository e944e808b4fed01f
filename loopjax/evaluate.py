"""Scores a model on a whole split."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from loopjax import program as program_lib
from loopjax import sharding, step
from loopjax.data import pipeline
from loopjax.types import Dataset

# (params, num_examples=0 for all) -> {split: {score: value}}.
Evaluator = Callable[..., dict[str, dict[str, float]]]
# What models show of themselves in every evaluation, if they can.
MODEL_TRACES = ("attention_mass",)
# Groups of this name are splits of their own, not parts of "eval".
SPLIT = "split"


def make_evaluator(
  program: program_lib.Program,
  dataset: Dataset,
  between_batches: Callable[[], None] = lambda: None,
) -> Evaluator:
  """Compiles the scoring of a dataset.

  Args:
    program: of the run.
    dataset: the evaluation split.
    between_batches: is called before every batch and may raise.

  Returns:
    (params, num_examples=0 for all) -> {split: scores}, for split "eval" and
    every group of a grouping "split" (groups of these are named "SPLIT/GROUP").
    Scores are the mean, standard error and count of all that the task and the
    model give, over all and by group: "exact_match",
    "exact_match/standard_error", "exact_match/rating=3-9", "count", ...
  """
  settings, mesh = program.settings, program.mesh
  task, family = settings.task_module, settings.family
  eval_fn = jax.jit(
    functools.partial(
      program_lib.on_mesh(mesh, step.eval_step),
      graphdef=program.graphdef,
      score=task.score,
      group_sizes={name: len(g) for name, g in dataset.groups.items()},
      num_loops=settings.eval_loops,
      kind=settings.eval.loop_kind,
      trace=tuple(
        name
        for name in family.TRACES
        if name in task.TRACES or name in MODEL_TRACES
      ),
    ),
    out_shardings=sharding.replicated(mesh),
  )
  batch_size = settings.eval.batch_size

  def evaluate(
    params: Any, num_examples: int = 0
  ) -> dict[str, dict[str, float]]:
    num_batches = math.ceil(num_examples / batch_size) or None
    batches = itertools.islice(pipeline.iterate(dataset.batches), num_batches)
    total = None
    for batch in batches:
      between_batches()
      sums = eval_fn(params, sharding.put_batch(mesh, batch, batch_size))
      # One small read a batch keeps the device queue short.
      sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
      total = sums if total is None else jax.tree.map(np.add, total, sums)
    return _means(total, dataset.groups)

  return evaluate


def _means(sums, groups) -> dict[str, dict[str, float]]:
  """Means, standard errors and counts from sums and sums of squares."""
  splits: dict[str, dict[str, float]] = {"eval": {}}
  for grouping, scores in sums.items():
    counts = scores.pop("count")
    for group, count in enumerate(counts):
      if not count:
        continue
      name = groups[grouping][group] if grouping else ""
      split, name = _place(grouping, name, groups.get(SPLIT, ()))
      suffix = f"/{grouping}={name}" if name else ""
      metrics = splits.setdefault(split, {})
      metrics[f"count{suffix}"] = float(count)
      for score, powers in scores.items():
        mean, square = powers[group] / count
        variance = max(square - mean**2, 0.0)
        metrics[f"{score}{suffix}"] = float(mean)
        metrics[f"{score}{suffix}/standard_error"] = float(
          math.sqrt(variance / count)
        )
  return splits


def _place(grouping: str, name: str, splits: Sequence[str]) -> tuple[str, str]:
  """(split, group within it or "") that a group's numbers are reported under.

  A group "SPLIT/GROUP" of any grouping is one of that split.
  """
  if grouping == SPLIT:
    return name, ""
  split, _, rest = name.partition("/")
  return (split, rest) if split in splits else ("eval", name)
