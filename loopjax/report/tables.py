"""Finds the runs under a directory and averages them over seeds."""

import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax import sections
from loopjax.errors import UserError
from loopjax.report.paper import Column, Row
from loopjax.run import workdir as workdir_lib

SEEDS = ("run.seed", "task.graph_seed", "task.split_seed")


class Run(NamedTuple):
  """One run, planned or existing.

  Attributes:
    directory: where it is or would be.
    overrides: set by its sweep; none outside of a sweep.
    settings: all those planned by its sweep, by "section.key"; none outside.
    state: "completed", "not run", "incomplete, step 10 of 20", ...
    config: its config.json; empty if there is none.
    summary: its summary.json if it is complete, else empty.
  """

  directory: pathlib.Path
  overrides: Mapping[str, Any]
  settings: Mapping[str, Any]
  state: str
  config: Mapping[str, Any]
  summary: Mapping[str, Any]

  @property
  def done(self) -> bool:
    """Whether its numbers count."""
    return self.state == "completed"


class Plan(NamedTuple):
  """A sweep as planned in its sweep-NAME.json.

  Attributes:
    name: of the sweep.
    command: to run it.
    task: task.name of its config. model: model.name of its first item.
    runs: in its order.
  """

  name: str
  command: str
  task: str
  model: str
  runs: list[Run]


class Group(NamedTuple):
  """Runs that differ only in their seed."""

  overrides: Mapping[str, Any]
  runs: list[Run]

  @property
  def settings(self) -> Mapping[str, Any]:
    """The settings of its runs, with the seed of one."""
    return self.runs[0].settings


class Spread(NamedTuple):
  """Numbers of several seeds.

  Attributes:
    mean: of them.
    std: sample standard deviation (n - 1); None for a single number.
    seeds: by seed.
  """

  mean: float
  std: float | None
  seeds: Mapping[int, float]


def collect(workdir: pathlib.Path) -> tuple[list[Plan], list[Run]]:
  """The sweeps under a directory, and the runs that belong to none.

  Raises:
    UserError: the directory is missing or contains no run, or a file in it
      is malformed.
  """
  if not workdir.is_dir():
    raise UserError(f"{workdir}: there is no such directory")
  plans = [_read_plan(path) for path in sorted(workdir.glob("sweep-*.json"))]
  known = {run.directory.resolve() for plan in plans for run in plan.runs}
  others = [
    read_run(path, {}, {})
    for path in [workdir, *sorted(workdir.iterdir())]
    if (path / "config.json").is_file() and path.resolve() not in known
  ]
  if not plans and not others:
    raise UserError(f"{workdir}: contains no run and no sweep")
  return plans, others


def read_run(
  directory: pathlib.Path,
  overrides: Mapping[str, Any],
  settings: Mapping[str, Any],
) -> Run:
  """Reads a run and says what state it is in."""
  planned = directory, overrides, settings
  if not (directory / "config.json").is_file():
    return Run(*planned, "not run", {}, {})
  config = workdir_lib.read_json(directory / "config.json")
  flat = sections.flatten(config)
  if any(flat.get(key) != value for key, value in overrides.items()):
    return Run(*planned, "another configuration", {}, {})
  if not (directory / "summary.json").is_file():
    rows = workdir_lib.read_metrics(directory)
    step = rows[-1]["step"] if rows else 0
    state = f"incomplete, step {step} of {flat.get('run.num_steps')}"
    return Run(*planned, state, config, {})
  summary = workdir_lib.read_json(directory / "summary.json")
  state = str(summary.get("status"))
  return Run(*planned, state, config, summary if state == "completed" else {})


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


def spread(values: Mapping[int, float]) -> Spread | None:
  """Mean and sample standard deviation; None without values."""
  if not values:
    return None
  numbers = list(values.values())
  std = statistics.stdev(numbers) if len(numbers) > 1 else None
  return Spread(statistics.fmean(numbers), std, values)


def ours(group: Group, column: Column) -> Spread | None:
  """One quantity over the completed runs of a group."""
  values = {}
  for run in group.runs:
    if run.done:
      value = column.value(run.config, run.summary)
      if value is not None:
        values[run.config["run"]["seed"]] = value
  return spread(values)


def row_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> Row | None:
  """The row of the paper that fits an item, with the most settings."""
  fitting = [row for row in rows if fits(row.settings, settings)]
  return max(fitting, key=lambda row: len(row.settings), default=None)


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


def varying(groups: Sequence[Group]) -> list[str]:
  """Keys whose values differ between groups, in order."""
  keys = dict.fromkeys(key for group in groups for key in group.overrides)
  return [
    key
    for key in keys
    if any(
      key not in group.overrides
      or group.overrides[key] != groups[0].overrides.get(key)
      for group in groups
    )
  ]


def as_text(overrides: Mapping[str, Any]) -> str:
  """Overrides as readable text."""
  return ", ".join(
    f"{key.partition('.')[2]}\u00a0=\u00a0{value}"
    for key, value in overrides.items()
  )


def _read_plan(path: pathlib.Path) -> Plan:
  """Reads a sweep-NAME.json and the runs that it names."""
  manifest = workdir_lib.read_json(path)
  try:
    # Items have no config in sweeps of earlier versions.
    configs = [item.get("config", {}) for item in manifest["items"]]
    models = [config.get("model", {}).get("name", "") for config in configs]
    common = manifest.get("overrides", {})
    arguments = [
      f"--config={manifest['config']}",
      *(f"--config.{key}={value}" for key, value in common.items()),
      f"--sweep={manifest['sweep']}",
      f"--workdir={path.parent}",
    ]
    return Plan(
      # The file name is safe as the name of a plot.
      name=path.stem.removeprefix("sweep-"),
      command=" ".join(["python -m loopjax.sweep", *arguments]),
      task=manifest.get("task", ""),
      # The first may be of the family that others start from.
      model=models[-1] if models else "",
      runs=[
        read_run(
          path.parent / item["directory"],
          item["overrides"],
          {**sections.flatten(item.get("config", {})), **item["overrides"]},
        )
        for item in manifest["items"]
      ],
    )
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(f"{path}: is not a list of runs: {error!r}") from error
