"""Groups runs by their settings, averages them over seeds, and names them."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from loopjax import sections
from loopjax.report.papers import Column, Paper, Row, Sweep
from loopjax.report.runs import DATA, Run, data_apart

SEEDS = ("run.seed", "task.eval_seed", "task.graph_seed", "task.split_seed")


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
    seeds: the finite numbers, at least one, by seed, by all seeds of a run,
      `0/1`, or by the paths of runs.
    missing: the names of those without a finite number.
    evaluation: standard error over the examples of the evaluation, averaged
      over seeds; None if unknown.
  """

  seeds: Mapping[str, float]
  missing: tuple[str, ...] = ()
  evaluation: float | None = None

  @property
  def mean(self) -> float:
    """Mean over seeds."""
    return statistics.fmean(self.seeds.values())

  @property
  def std(self) -> float | None:
    """Sample standard deviation (n - 1); None for a single number."""
    # Exact, unlike that of pandas: 0 if all numbers are equal.
    numbers = self.seeds.values()
    return statistics.stdev(numbers) if len(numbers) > 1 else None

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
    from scipy import special  # Takes long: only seeds need it.

    factor = float(special.stdtrit(len(self.seeds) - 1, 0.975))
    return factor * self.std / math.sqrt(len(self.seeds))


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
  """Groups runs by their overrides except the seeds, in order.

  Runs that learned from different files are never in one group.
  """
  groups: dict[str, Group] = {}
  for run, data in zip(runs, data_apart(runs), strict=True):
    key = {k: value for k, value in run.overrides.items() if k not in SEEDS}
    key |= {DATA: data} if data else {}
    text = json.dumps(key, sort_keys=True)
    groups.setdefault(text, Group(key, [])).runs.append(run)
  return list(groups.values())


def spread(values: pd.Series, evaluation: float | None = None) -> Spread | None:
  """The spread of numbers by name; None if none is finite."""
  finite = values[np.isfinite(values)].to_dict()
  missing = tuple(name for name in values.index if name not in finite)
  return Spread(finite, missing, evaluation) if finite else None


def ours(group: Group, column: Column) -> Spread | None:
  """One quantity over the completed runs of a group."""
  done = [run for run in group.runs if run.done]
  numbers = [(column.of(run), column.standard_error(run)) for run in done]
  found = pd.DataFrame(numbers, _seeds(done), ["value", "error"], float)
  error = found["error"][np.isfinite(found["value"])].mean()
  return spread(found["value"], None if np.isnan(error) else float(error))


def _seeds(runs: Sequence[Run]) -> list[str]:
  """The seed of each run; where two are equal, all that its sweep sets."""
  seeds = [str(run.config["run"]["seed"]) for run in runs]
  if len(set(seeds)) == len(seeds):
    return seeds
  others = [
    [str(run.overrides[key]) for key in SEEDS[1:] if key in run.overrides]
    for run in runs
  ]
  return ["/".join([x, *more]) for x, more in zip(seeds, others, strict=True)]


def row_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> Row | None:
  """The most specific of the paper's rows that fit an item, or None."""
  fitting = [row for row in rows if fits(row.settings, settings)]
  return max(fitting, key=lambda row: len(row.settings), default=None)


def verdict(group: Group, sweep: Sweep, paper: Paper) -> str:
  """Whether a group's numbers agree with the paper's.

  Numbers agree if they differ by at most two standard errors of the difference,
  which combines our error and the paper's over its seeds, in every column that
  both have. Columns in which neither error is known decide nothing.

  Returns:
    "agrees", "disagrees", "not run", or "not run at this scale"; "" if the
    paper has no numbers for it, or no column decides.
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
  near = [
    abs(mine.mean - mean) <= 2 * math.hypot(mine.standard_error or 0.0, error)
    for mine, mean, error in pairs
    if mine and (mine.standard_error is not None or error)
  ]
  if not near:
    return ""
  return "agrees" if all(near) else "disagrees"


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


# The settings that name a row or a line first, in words.
_NAMES = {
  DATA: "data",
  "task.name": "task",
  "model.name": "model",
  "optim.name": "optimizer",
  "model.num_loops": "loops",
  "model.num_layers": "layers",
  "model.num_memory_tokens": "memory tokens",
  "model.halting": "halting",
  "model.injection": "injection",
  "model.depth": "loops in training",
  "model.update": "update",
  "task.num_steps": "rule steps",
  "model.num_local_slots": "slots per layer",
  "model.num_global_slots": "shared slots",
  "model.mlp_ratio": "MLP width over model width",
  "model.sweeps": "parallel sweeps after the chunks",
  "model.chunk_size": "tokens per chunk",
  "model.chunk_jitter": "chunks of random sizes",
  "model.A_range": "range of the decay A",
  "model.num_with_gradient": "last loops with a gradient (0: all)",
  "model.growth_steps": "steps at which loops grow",
  "model.growth_loops": "loops before each growth",
  "model.gate_bias": "initial bias of the gate",
  "model.num_heads": "heads",
  "model.ponder_weight": "ponder weight",
  "model.ponder_warmup_steps": "its warm-up steps",
  "optim.muon_learning_rate": "learning rate of Muon",
  "optim.warmup_steps": "warm-up steps",
  "run.num_steps": "training steps",
  "run.init_from": "starts from",
  "run.init_fresh": "reinitialised",
}
# How a run is watched and what it begins from: left to its command.
_MINOR = (
  "eval.", "run.log", "run.checkpoint", "run.steps_", "run.init", "run.teacher",
)  # fmt: skip


AS_IT_IS = "config defaults"


def varying(groups: Sequence[Group]) -> list[str]:
  """Keys whose values differ between groups, in order."""
  return sections.differing([group.overrides for group in groups])


def distinguishing(groups: Sequence[Group]) -> list[str]:
  """The varying keys without keys that follow from others.

  Names of tasks and models are kept and come first; then the keys of _NAMES, in
  order, and other settings of task and model, before rates and steps.
  """
  names = varying(groups)
  for key in sorted(reversed(names), key=_interest):
    fewer = [name for name in names if name != key]
    if not key.endswith(".name") and (
      _num_different(groups, fewer) == _num_different(groups, names)
    ):
      names = fewer
  return sorted(names, key=_interest, reverse=True)


def of_group(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
  """The settings that distinguish a group, and its other differences."""
  first = distinguishing(groups)
  more = [  # A setting of a single family follows from its name.
    key
    for key in varying(groups)
    if key not in first
    and not key.startswith(_MINOR)
    and all(key in group.overrides for group in groups)
  ]
  name, also = (
    as_text({k: group.overrides[k] for k in keys if k in group.overrides})
    for keys in (first, more)
  )
  return name or (AS_IT_IS if len(groups) > 1 else "all runs"), also


def same_everywhere(groups: Sequence[Group]) -> str:
  """The settings that all groups override with the same value, in words."""
  keys = varying(groups)
  first = groups[0].overrides if groups else {}
  return as_text({k: v for k, v in first.items() if k not in keys})


def as_text(overrides: Mapping[str, Any]) -> str:
  """Overrides as readable text: `loops = 4, model = disco`."""
  return ", ".join(
    f"{words(key)}\u00a0=\u00a0{_as_said(value)}"
    for key, value in overrides.items()
  )


def words(key: str) -> str:
  """A setting's name in words, without its section."""
  name = key.partition(".")[2].removeprefix("num_").replace("_", " ")
  return _NAMES.get(key, name)


def _interest(key: str) -> tuple[bool, int, int]:
  """Sort key: what matters least comes first."""
  section = key.partition(".")[0]
  place = list(_NAMES).index(key) if key in _NAMES else len(_NAMES)
  return (
    not key.startswith(_MINOR),
    ("run", "optim").index(section) if section in ("run", "optim") else 2,
    -place,
  )


def _num_different(groups: Sequence[Group], keys: Sequence[str]) -> int:
  rows = {repr([group.overrides.get(key) for key in keys]) for group in groups}
  return len(rows)


def _as_said(value: Any) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  return "none" if value in ("", []) else str(value).replace("_", " ")
