"""Scores a model on a whole split."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding, step
from loopjax.data import pipeline
from loopjax.types import Dataset

Evaluator = Callable[..., dict[str, float]]


def make_evaluator(
  settings: config_lib.Settings,
  graphdef: nnx.GraphDef,
  dataset: Dataset,
  mesh: Mesh,
) -> Evaluator:
  """Compiles the scoring of a dataset.

  Returns:
    (params, num_examples=0 for all) -> for every score its mean, standard error
    and count, over all and by group: "exact_match",
    "exact_match/standard_error", "exact_match/rating=3-9", "count", ...
  """
  eval_fn = jax.jit(
    functools.partial(
      step.eval_step,
      graphdef=graphdef,
      score=settings.task_module.score,
      group_sizes={name: len(g) for name, g in dataset.groups.items()},
      num_loops=settings.eval_loops,
      kind=settings.eval.loop_kind,
    ),
    out_shardings=sharding.replicated(mesh),
  )
  batch_size = settings.eval.batch_size
  placed = sharding.batch_sharding(mesh)

  def evaluate(params: Any, num_examples: int = 0) -> dict[str, float]:
    wanted = min(num_examples or math.inf, dataset.num_examples)
    num_batches = math.ceil(wanted / batch_size)
    batches = itertools.islice(pipeline.iterate(dataset.batches), num_batches)
    total = None
    for batch in batches:
      sums = eval_fn(params, sharding.put_batch(batch, placed))
      # One small read a batch keeps the device queue short.
      sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
      total = sums if total is None else jax.tree.map(np.add, total, sums)
    return _means(total, dataset.groups)

  return evaluate


def _means(sums, groups) -> dict[str, float]:
  """Means, standard errors and counts from sums and sums of squares."""
  metrics = {}
  for grouping, scores in sums.items():
    counts = scores.pop("count")
    for group, count in enumerate(counts):
      if not count:
        continue
      suffix = f"/{grouping}={groups[grouping][group]}" if grouping else ""
      metrics[f"count{suffix}"] = float(count)
      for name, powers in scores.items():
        mean, square = powers[group] / count
        variance = max(square - mean**2, 0.0)
        metrics[f"{name}{suffix}"] = float(mean)
        metrics[f"{name}{suffix}/standard_error"] = float(
          math.sqrt(variance / count)
        )
  return metrics
