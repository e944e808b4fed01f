"""Groups runs by their settings, averages them over seeds, and names them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopjax import sections
from loopjax.report.paper import Column, Metric, Paper, Row, Sweep
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
    mean: mean over seeds.
    std: sample standard deviation (n - 1); None for a single number.
    seeds: the numbers, by seed, or by all seeds of a run: `0/1`.
    evaluation: standard error over the examples of the evaluation, averaged
      over seeds; None if unknown.
    missing: the runs that should be among them and have no finite number, by
      the same names as `seeds`, or by their paths.
  """

  mean: float
  std: float | None
  seeds: Mapping[int | str, float]
  evaluation: float | None = None
  missing: tuple[int | str, ...] = ()

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
  groups: list[Group] = []
  for run, data in zip(runs, data_apart(runs), strict=True):
    key = {k: v for k, v in run.overrides.items() if k not in SEEDS}
    key |= {DATA: data} if data else {}
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
    value = column.of(run)
    if value is not None and math.isfinite(value):
      values[seed] = value
      if isinstance(column.value, Metric):
        errors.append(column.value.standard_error(run.config, run.summary))
  found, known = spread(values), [e for e in errors if e is not None]
  if found is None:
    return None
  missing = tuple(seed for seed in _seeds(done) if seed not in values)
  error = statistics.fmean(known) if known else None
  return found._replace(evaluation=error, missing=missing)


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
