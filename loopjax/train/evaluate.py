"""Scores a model on whole splits."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import check_scores, pipeline
from loopjax.errors import UserError
from loopjax.program import eval_step as eval_step_lib
from loopjax.run import metrics
from loopjax.types import Batch, Dataset, Output

# (params, split, num_examples=0 for all) -> {split: {score: value}}.
Evaluator = Callable[..., dict[str, dict[str, float]]]
# Traces that every evaluation requests from models that have them.
MODEL_TRACES = ("attention_mass",)
# Groups of this grouping are reported as separate splits.
SPLIT = "split"


def make_evaluator(
  program: program_lib.Program,
  datasets: Mapping[str, Dataset],
  between_batches: Callable[[], None] = lambda: None,
) -> Evaluator:
  """Compiles an evaluator of datasets.

  Args:
    program: the run's program.
    datasets: the datasets, by split.
    between_batches: called before every batch; may raise.

  Returns:
    A function (params, split, num_examples=0 for all) -> {split: scores}. If
    the dataset has a grouping "split", each of its groups is scored instead of
    the whole, whose score would be meaningless (groups within these are named
    "SPLIT/GROUP"). Scores are the (weighted) mean, standard error and count of
    every score of the task and statistic of the model, overall and by group:
    "exact_match", "exact_match/standard_error", "exact_match/rating=3-9",
    "count", ...
  """
  mesh, batch_size = program.mesh, program.settings.eval.batch_size
  eval_fn = _step(program)

  def evaluate(
    params: Any, split: str, num_examples: int = 0
  ) -> dict[str, dict[str, float]]:
    dataset = datasets[split]
    sizes = _group_sizes(dataset)
    num_batches = math.ceil(num_examples / batch_size) or None
    batches = itertools.islice(pipeline.iterate(dataset.batches), num_batches)
    total: Any = None
    running: Any = None
    for batch in batches:
      between_batches()
      placed = sharding.put_batch(mesh, batch, batch_size)
      last, running = running, eval_fn(params, placed, group_sizes=sizes)
      # The device already has the next batch while the host waits for a result.
      total = _added(total, last)
    return _means(_added(total, running), dataset.groups, split)

  return evaluate


def check(
  program: program_lib.Program, dataset: Dataset, best_metric: str = ""
) -> None:
  """Checks that the task's scores fit its description.

  Computes nothing: names follow from shapes.

  Args:
    program: the run's program.
    dataset: the validation split.
    best_metric: a score that the split must have, "split/score" with a leading
      minus if lower is better; "" for none.

  Raises:
    UserError: the task's scores do not fit its description, or none is
      `best_metric`.
  """
  batch, params = dataset.batches[0], program.abstract_params
  sizes = _group_sizes(dataset)
  shapes = jax.eval_shape(_step(program), params, batch, group_sizes=sizes)
  if not best_metric:
    return
  sums = jax.tree.map(lambda leaf: np.ones(leaf.shape), shapes)
  names = [
    name
    for split, scores in _means(sums, dataset.groups, "validation").items()
    for name in metrics.named(split, scores)
    if "standard_error" not in name
  ]
  if best_metric.removeprefix("-") not in names:
    raise UserError(
      f"run.best_metric={best_metric!r} is not an evaluation score; expected"
      f" one of {', '.join(names)}"
    )


def _step(program: program_lib.Program) -> Callable[..., Any]:
  """The compiled `eval_step`: (params, batch, group_sizes) -> sums."""
  settings, mesh = program.settings, program.mesh
  task, family = settings.task_module, settings.family

  def score(output: Output, batch: Batch) -> Mapping[str, Any]:
    return check_scores(task, task.score(output, batch), len(batch["inputs"]))

  return jax.jit(
    functools.partial(
      program_lib.on_mesh(mesh, eval_step_lib.eval_step),
      graphdef=program.graphdef,
      score=score,
      num_loops=settings.eval_loops,
      kind=settings.eval.execution,
      trace=tuple(
        name
        for name in family.traces
        if name in task.TRACES or name in MODEL_TRACES
      ),
    ),
    static_argnames="group_sizes",
    out_shardings=sharding.replicated(mesh),
  )


def _group_sizes(dataset: Dataset) -> tuple[tuple[str, int], ...]:
  """Number of groups of each grouping."""
  return tuple((name, len(group)) for name, group in dataset.groups.items())


def _added(total: Any, sums: Any) -> Any:
  """The sum of both on the host, in float64; None is 0."""
  if sums is None:
    return total
  sums = jax.tree.map(np.float64, jax.device_get(sums))
  return sums if total is None else jax.tree.map(np.add, total, sums)


def _means(sums, groups, scored_split: str) -> dict[str, dict[str, float]]:
  """Means, standard errors and counts from sums and sums of squares.

  A score without weight in a group has no mean, and is not in the result.

  Args:
    sums: results of `eval_step`, by grouping and score; "" is overall.
    groups: names of the groups, by grouping.
    scored_split: the split that was scored.
  """
  splits: dict[str, dict[str, float]] = {}
  for grouping, scores in sums.items():
    if SPLIT in groups and not grouping:
      continue
    counts = scores.pop("count")
    for group, count in enumerate(counts):
      if not count:
        continue
      name = groups[grouping][group] if grouping else ""
      split, name = _place(grouping, name, scored_split, groups.get(SPLIT, ()))
      suffix = f"/{grouping}={name}" if name else ""
      means = splits.setdefault(split, {})
      means[f"count{suffix}"] = float(count)
      for score, powers in scores.items():
        weight, total, *squares = powers[group]
        if not weight:
          continue  # No example counts for this score.
        mean = total / weight
        # Variance of a ratio of sums: sum w^2 (v - mean)^2 / (sum w)^2.
        variance = np.dot(squares, (mean**2, -2 * mean, 1))
        means[f"{score}{suffix}"] = float(mean)
        means[f"{score}{suffix}/standard_error"] = float(
          math.sqrt(max(variance, 0.0)) / weight
        )
  return splits


def _place(
  grouping: str, name: str, scored_split: str, splits: Sequence[str]
) -> tuple[str, str]:
  """(split, group within it or "") under which a group is reported.

  A group "SPLIT/GROUP" of any grouping belongs to SPLIT.
  """
  if grouping == SPLIT:
    return name, ""
  split, _, group = name.partition("/")
  return (split, group) if split in splits else (scored_split, name)
