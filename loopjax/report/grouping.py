"""Groups runs by their settings, and averages them over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import special

from loopjax.report.paper import (
  Column,
  Metric,
  OfEvaluations,
  Paper,
  Row,
  Sweep,
)
from loopjax.report.runs import Run

SEEDS = (
  "run.seed",
  "task.eval_seed",
  "task.graph_seed",
  "task.split_seed",
)


class Group(NamedTuple):
  """Runs that differ only in their seed."""

  overrides: Mapping[str, Any]
  runs: list[Run]

  @property
  def settings(self) -> Mapping[str, Any]:
    """The settings of its runs, with the seed of one."""
    return self.runs[0].settings


class Spread(NamedTuple):
  """One quantity over several seeds.

  Attributes:
    mean: mean over seeds.
    std: sample standard deviation (n - 1); None for a single number.
    seeds: the numbers, by seed, or by all seeds of a run: `0/1`.
    evaluation: standard error over the examples of the evaluation, averaged
      over seeds; None if unknown.
  """

  mean: float
  std: float | None
  seeds: Mapping[int | str, float]
  evaluation: float | None = None

  @property
  def standard_error(self) -> float | None:
    """Standard error of the mean, over seeds, or over examples for one seed."""
    if self.std is None:
      return self.evaluation
    return self.std / math.sqrt(len(self.seeds))

  @property
  def interval(self) -> float | None:
    """Half the width of the mean's 95 % interval over seeds, by Student's t."""
    if self.std is None:
      return None
    factor = float(special.stdtrit(len(self.seeds) - 1, 0.975))
    return factor * self.std / math.sqrt(len(self.seeds))


def group_by_seed(runs: Iterable[Run]) -> list[Group]:
  """Groups runs by their overrides except the seeds, in order."""
  groups: list[Group] = []
  for run in runs:
    key = {k: v for k, v in run.overrides.items() if k not in SEEDS}
    for group in groups:
      if group.overrides == key:
        group.runs.append(run)
        break
    else:
      groups.append(Group(key, [run]))
  return groups


def spread(values: Mapping[int | str, float]) -> Spread | None:
  """Mean and sample standard deviation; None without values."""
  if not values:
    return None
  numbers = list(values.values())
  std = statistics.stdev(numbers) if len(numbers) > 1 else None
  return Spread(statistics.fmean(numbers), std, values)


def ours(group: Group, column: Column) -> Spread | None:
  """One quantity over the completed runs of a group."""
  values, errors = {}, []
  done = [run for run in group.runs if run.done]
  for seed, run in zip(_seeds(done), done, strict=True):
    value = (
      column.value.read(run.rows)
      if isinstance(column.value, OfEvaluations)
      else column.value(run.config, run.summary)
    )
    if value is not None and not math.isnan(value):
      values[seed] = value
      if isinstance(column.value, Metric):
        errors.append(column.value.standard_error(run.summary))
  found, known = spread(values), [e for e in errors if e is not None]
  if found is None or not known:
    return found
  return found._replace(evaluation=statistics.fmean(known))


def _seeds(runs: Sequence[Run]) -> list[int | str]:
  """The seed of each run; where two are equal, all that its sweep sets."""
  seeds = [run.config["run"]["seed"] for run in runs]
  if len(set(seeds)) == len(seeds):
    return seeds
  others = [
    [run.overrides[key] for key in SEEDS[1:] if key in run.overrides]
    for run in runs
  ]
  return [
    "/".join(map(str, [seed, *more]))
    for seed, more in zip(seeds, others, strict=True)
  ]


def row_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> Row | None:
  """The most specific of the paper's rows that fit an item, or None."""
  fitting = [row for row in rows if fits(row.settings, settings)]
  return max(fitting, key=lambda row: len(row.settings), default=None)


def verdict(group: Group, sweep: Sweep, paper: Paper) -> str:
  """Whether a group's numbers agree with the paper's.

  Numbers agree if they differ by at most two standard errors of the difference,
  which combines our error and the paper's over its seeds, in every column that
  both have.

  Returns:
    "agrees", "disagrees", "not run", or "not run at this scale"; "" if the
    paper has no numbers for it.
  """
  row = row_of(group.settings, sweep.rows)
  pairs = [
    (ours(group, column), theirs.mean, theirs.standard_error)
    for column in sweep.columns
    if (theirs := row and row.values.get(column.key))
    and theirs.mean is not None
  ]
  if not pairs:
    return ""
  if not any(mine for mine, _, _ in pairs):
    return "not run"
  if paper.size is None or not fits(paper.size, group.settings):
    return "not run at this scale"
  agree = all(
    abs(mine.mean - mean) <= 2 * math.hypot(mine.standard_error or 0.0, error)
    for mine, mean, error in pairs
    if mine
  )
  return "agrees" if agree else "disagrees"


def fits(wanted: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
  """Whether an item has all of these settings."""
  return all(
    key in settings
    and (
      settings[key] in value
      if isinstance(value, frozenset)
      else settings[key] == value
    )
    for key, value in wanted.items()
  )
