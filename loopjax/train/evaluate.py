"""Scores a model on whole splits."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import check_scores, pipeline
from loopjax.errors import UserError
from loopjax.loop import starts as starts_lib
from loopjax.program import step as step_lib
from loopjax.run import metrics, statistics
from loopjax.train import breadth
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
    A function (params, split, num_examples=0 for all, kept=None) -> {split:
    scores}; `kept` keeps examples with several starts, see `breadth`. If the
    dataset has a grouping "split", each of its groups is scored instead of
    the whole, whose score would be meaningless (groups within these are named
    "SPLIT/GROUP"). Scores are the (weighted) mean, standard error and count of
    every score of the task and statistic of the model, overall and by group:
    "exact_match", "exact_match/standard_error", "exact_match/rating=3-9",
    "count", ...
  """
  eval_fn, batch_size = _step(program), program.settings.eval.batch_size

  def evaluate(
    params: Any,
    split: str,
    num_examples: int = 0,
    kept: breadth.Kept | None = None,
  ) -> dict[str, dict[str, float]]:
    dataset = datasets[split]
    batches = dataset.batches[: math.ceil(num_examples / batch_size) or None]
    rows = _scored(program, eval_fn, batches, params, between_batches, kept)
    return means(rows, dataset.groups, split)

  return evaluate


def score_examples(
  program: program_lib.Program, dataset: Dataset, params: Any
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Every score of every example that counts, see `_weighted`."""
  rows = _scored(program, _step(program), dataset.batches, params)
  return _weighted(jax.tree.map(lambda x: x[rows["valid"]], rows))


def columns(
  program: program_lib.Program, dataset: Dataset, params: Any
) -> dict[str, np.ndarray]:
  """Every score of every example, f64 [N], and its group by grouping.

  A score is not a number in an example that does not count for it.
  """
  rows = _scored(program, _step(program), dataset.batches, params)
  is_example = rows["valid"] > 0
  return {
    name: np.where(weights > 0, values, np.nan)[is_example]
    for name, (values, weights) in _weighted(rows).items()
  } | {
    grouping: np.array(names)[rows[f"group/{grouping}"][is_example]]
    for grouping, names in dataset.groups.items()
  }


def _scored(
  program: program_lib.Program,
  eval_fn: Callable[..., Any],
  batches: Any,
  params: Any,
  between_batches: Callable[[], None] = lambda: None,
  kept: breadth.Kept | None = None,
) -> dict[str, Any]:
  """The results of `eval_step` on batches, of all examples."""
  if starts := starts_lib.of(program.settings):
    return breadth.scored(
      program, eval_fn, batches, params, starts, between_batches, kept
    )
  mesh, batch_size = program.mesh, program.settings.eval.batch_size
  found: list[Any] = []
  running: Any = None
  for batch in pipeline.iterate(batches):
    between_batches()
    placed = sharding.put_batch(mesh, batch, batch_size)
    last, running = running, eval_fn(params, placed)
    # The device already has the next batch while the host waits for a result.
    if last is not None:
      found.append(jax.device_get(last))
  found.append(jax.device_get(running))
  rows: dict[str, Any] = jax.tree.map(lambda *x: np.concatenate(x), *found)
  return rows


def _weighted(
  rows: Mapping[str, Any],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """(values, weights) of every score, f64 [N] each.

  Examples without weight do not count, among them those that fill a batch.
  """
  valid = rows["valid"].astype(np.float64)
  found = {}
  for name, value in rows["scores"].items():
    v, w = value if isinstance(value, tuple) else (value, 1.0)
    found[name] = v.astype(np.float64), valid * w
  return found


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
  """
  batch, params = dataset.batches[0], program.abstract_params
  if starts := starts_lib.of(program.settings):
    batch = breadth.with_starts(batch)
  shapes = jax.eval_shape(_step(program), params, batch)
  if not best_metric:
    return
  # As many examples as the most groups, so that every group has one.
  num = max([1, *map(len, dataset.groups.values())])
  if starts:
    shapes = breadth.combined(shapes, starts)
  rows = jax.tree.map(lambda _: np.ones(num), shapes)
  for grouping, groups in dataset.groups.items():
    rows[f"group/{grouping}"] = np.arange(num) % len(groups)
  names = [
    name
    for split, scores in means(rows, dataset.groups, "validation").items()
    for name in metrics.named(split, scores)
    if "standard_error" not in name
  ]
  if best_metric.removeprefix("-") not in names:
    raise UserError(
      f"run.best_metric={best_metric!r} is not an evaluation score; expected"
      f" one of {', '.join(names)}"
    )


def _step(program: program_lib.Program) -> Callable[..., Any]:
  """The compiled `eval_step`: (params, batch) -> scores of its examples."""
  settings, mesh = program.settings, program.mesh
  task, family = settings.task_module, settings.family
  starts = starts_lib.of(settings)
  read = {*task.TRACES, *MODEL_TRACES, *(starts_lib.TRACES if starts else ())}

  def score(output: Output, batch: Batch) -> Mapping[str, Any]:
    return check_scores(task, task.score(output, batch), len(batch["inputs"]))

  return jax.jit(
    functools.partial(
      program_lib.on_mesh(mesh, step_lib.eval_step),
      graphdef=program.graphdef,
      score=score,
      num_loops=settings.eval_loops,
      execution=settings.eval.execution,
      trace=tuple(name for name in family.traces if name in read),
      starts=starts,
    ),
    out_shardings=sharding.replicated(mesh),
  )


def means(
  rows: Mapping[str, Any],
  groups: Mapping[str, Sequence[str]],
  scored_split: str,
) -> dict[str, dict[str, float]]:
  """Means, standard errors and counts over examples.

  A score without weight in a group has no mean, and with the weight of a single
  example no error; these are not in the result.
  """
  valid = rows["valid"].astype(bool)
  sums, weights = {}, {}
  for name, (values, weights[name]) in _weighted(rows).items():
    sums[name] = weights[name] * values
  found = [] if SPLIT in groups else [("", "", valid)]
  found += [
    (grouping, name, valid & (rows[f"group/{grouping}"] == group))
    for grouping, names in groups.items()
    for group, name in enumerate(names)
  ]
  splits: dict[str, dict[str, float]] = {}
  for grouping, name, chosen in found:
    if not chosen.any():
      continue
    split, name = _place(grouping, name, scored_split, groups.get(SPLIT, ()))
    suffix = f"/{grouping}={name}" if name else ""
    means = splits.setdefault(split, {})
    means[f"count{suffix}"] = float(chosen.sum())
    for score in sums:
      if weights[score][chosen].any():
        mean, error = statistics.mean(
          sums[score][chosen], weights[score][chosen]
        )
        means[f"{score}{suffix}"] = float(mean)
        if not np.isnan(error):
          means[f"{score}{suffix}/standard_error"] = float(error)
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
