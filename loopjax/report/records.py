"""Runs as tidy records, and one setting against another as a table.

`loopjax.table`, the command `loopjax table` and report.csv are these records.
"""

import fnmatch
import glob
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax import sections
from loopjax.errors import UserError, similar
from loopjax.report import grouping
from loopjax.report import runs as runs_lib
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo

# What summary.json has besides metrics; named as a metric is.
FACTS = ("steps", "parameters", "wall_seconds")
# Where a run begins: other seeds may begin from other runs.
_PATHS = ("run.init_from", "run.teacher")


class Column(NamedTuple):
  """A column of a table of numbers.

  Attributes:
    metric: "split/metric".
    settings: what its runs have in common.
    seeds: the seeds of its runs; empty for all of them.
    cells: the number of each row over the runs there; None without any.
  """

  metric: str
  settings: Mapping[str, Any]
  seeds: Mapping[str, Any]
  cells: list[grouping.Spread | None]

  @property
  def label(self) -> str:
    """Its metric, settings and seeds: `test/loss, model.num_loops=4`."""
    words = [
      f"{k}={v}" for k, v in (*self.settings.items(), *self.seeds.items())
    ]
    return ", ".join([self.metric, *words])

  @property
  def is_mean(self) -> bool:
    """Whether a cell is the mean of several runs."""
    return any(cell and len(cell.seeds) > 1 for cell in self.cells)

  @property
  def missing(self) -> list[str]:
    """The paths of runs that lack a number that others of their cell have."""
    return [str(path) for cell in self.cells if cell for path in cell.missing]


class Pivot(NamedTuple):
  """Scores by settings.

  Attributes:
    rows: the values of the settings that each row has, "section.key".
    columns: the numbers.
  """

  rows: list[dict[str, Any]]
  columns: list[Column]

  def records(self) -> list[dict[str, Any]]:
    """A dict per row; a mean has its interval and number of runs beside it.

    Where runs have no number, their paths are beside the number of the others.
    """
    return [
      dict(row)
      | {
        name: value
        for column in self.columns
        for name, value in _flat(column, place).items()
      }
      for place, row in enumerate(self.rows)
    ]


def _flat(column: Column, place: int) -> dict[str, Any]:
  """The values of a cell by the name of their column."""
  cell = column.cells[place]
  found: dict[str, Any] = {column.label: cell and cell.mean}
  if column.is_mean or column.missing:
    found[f"{column.label}/interval"] = cell and cell.interval
    found[f"{column.label}/runs"] = len(cell.seeds) if cell else 0
  if column.missing:
    missing = cell.missing if cell else ()
    found[f"{column.label}/missing"] = " ".join(map(str, missing))
  return found


def read(places: Iterable[str | os.PathLike[str]]) -> list[runs_lib.Run]:
  """The runs of work directories, sweeps, stored runs, and folders of these.

  The runs that a sweep has planned are among them. Each run is there once, in
  the order of the places: paths, patterns of paths (what they match besides
  runs is left out), or zoo:NAME.

  Raises:
    UserError: a place has no runs, or all are damaged.
  """
  paths = [path for place in places for path in _matched(os.fspath(place))]
  found = [runs_lib.collect([path]) for path in paths]
  runs = [run for one in found for run in runs_lib.each_once(*one)]
  if not runs:
    raise UserError("no runs: name a work directory, a sweep, or stored runs")
  runs_lib.check_readable(runs)
  return runs_lib.each_once((), runs)


def _matched(place: str) -> list[pathlib.Path]:
  """The path that a text is, or those that match it and contain runs."""
  path = zoo.located(pathlib.Path(place))
  if path.exists() or not glob.has_magic(place):
    return [path]
  found = [pathlib.Path(match) for match in sorted(glob.glob(str(path)))]
  found = [match for match in found if runs_lib.has_runs(match)]
  if not found:
    raise UserError(f"{place}: matches no run")
  return found


def say_incomplete(runs: Iterable[runs_lib.Run]) -> bool:
  """Names the runs without final scores on standard error.

  Returns:
    Whether some of them are damaged, which is an error.
  """
  found = [run for run in runs if not run.done]
  for run in found:
    print(
      f"{'error' if run.damaged else 'note'}: {run.directory}: {run.state}; its"
      " scores are left blank",
      file=sys.stderr,
    )
  return any(run.damaged for run in found)


def say_missing(runs: Iterable[runs_lib.Run], pivot: Pivot) -> None:
  """Names the complete runs that a mean is without on standard error."""
  done = {str(run.directory) for run in runs if run.done}
  for column in pivot.columns:
    for path in column.missing:
      if path in done:
        print(
          f"note: {path}: has no finite {column.metric}; the number of its row"
          " is of the other runs",
          file=sys.stderr,
        )


def settings_of(run: runs_lib.Run) -> dict[str, Any]:
  """A run's settings by "section.key", or those that its sweep plans."""
  flat = sections.flatten(run.config) or run.settings
  if "made_by" in run.summary:  # A model of a program, which had no such plan.
    flat = {**flat, "run.num_steps": run.summary["steps"]}
  return {
    key: tuple(value) if isinstance(value, list) else value
    for key, value in flat.items()
  }


def _settings(runs: Sequence[runs_lib.Run]) -> list[dict[str, Any]]:
  """`settings_of` each run, with its data where they tell runs apart."""
  return [
    settings_of(run) | ({runs_lib.DATA: data} if data else {})
    for run, data in zip(runs, runs_lib.data_apart(runs), strict=True)
  ]


def scores_of(run: runs_lib.Run) -> dict[str, float]:
  """A run's final scores and FACTS by name; none if it is not complete."""
  facts = {name: run.summary[name] for name in FACTS if name in run.summary}
  return {**run.summary.get("metrics", {}), **facts}


def _varying(runs: Iterable[Mapping[str, Any]]) -> list[str]:
  """The settings in which runs differ, by section.

  Without the settings of a single family or task whose runs all have the same
  value: they follow from its name.
  """
  values: dict[str, list[Any]] = {}
  for settings in runs:
    for key, value in settings.items():
      known = values.setdefault(key, [])
      if value not in known:
        known.append(value)
  names = [key.partition(".")[0] for key in values]
  found = [key for key, known in values.items() if len(known) > 1]
  return sorted(found, key=lambda key: names.index(key.partition(".")[0]))


def metrics_of(
  runs: Sequence[runs_lib.Run], wanted: Sequence[str] = ()
) -> list[str]:
  """The names of the scores that are wanted, in order.

  They are names or patterns such as "depth/loss/loop=*"; if empty, all scores
  except training's, standard errors, and those of groups and loops.

  Raises:
    UserError: no run has such a score.
  """
  known = list(dict.fromkeys(name for run in runs for name in scores_of(run)))
  if not wanted:
    errors = "/standard_error"
    names = [x for x in known if not x.startswith("train/") and "=" not in x]
    found = [name for name in names if not name.endswith(errors)]
    return sorted(found, key=lambda name: name in FACTS)
  if not known:
    return list(wanted)  # No run is complete: nothing to compare with.
  names = []
  for pattern in wanted:
    found = [pattern] if pattern in known else fnmatch.filter(known, pattern)
    if not found:
      near = similar(pattern, known)
      raise UserError(f"--metric={pattern}: no run has this score{near}")
    names += found
  return list(dict.fromkeys(names))


def records(
  runs: Sequence[runs_lib.Run], metrics: Sequence[str] = ()
) -> list[dict[str, Any]]:
  """A dict per run: its path, state, settings that differ, and scores.

  `metrics` as in `metrics_of`.
  """
  settings = _settings(runs)
  scores = [scores_of(run) for run in runs]
  keys, names = _varying(settings), metrics_of(runs, metrics)
  return [
    {"run": run.directory.as_posix(), "state": run.state}
    | {key: its.get(key) for key in keys}
    | {name: found.get(name) for name in names}
    for run, its, found in zip(runs, settings, scores, strict=True)
  ]


class _Known(NamedTuple):
  """A run with its settings and scores."""

  run: runs_lib.Run
  settings: Mapping[str, Any]
  scores: Mapping[str, float]

  def values(self, keys: Iterable[str]) -> dict[str, Any]:
    return {key: self.settings.get(key) for key in keys}

  @property
  def seed(self) -> int | str:
    """Its seed, or all of its seeds: `0/1`."""
    seeds = [
      self.settings[key] for key in grouping.SEEDS if key in self.settings
    ]
    return "/".join(map(str, seeds))


# The values of some settings, and the runs that have them.
_Values = tuple[dict[str, Any], list[_Known]]


def pivot(
  runs: Sequence[runs_lib.Run],
  metrics: Sequence[str],
  rows: Sequence[str],
  columns: Sequence[str],
) -> Pivot:
  """Scores by settings; runs that differ only in their seeds are averaged.

  Rows and columns are in the order of the settings that are named: numbers
  ascend, others are in the order of the runs. With a seed in `columns` each
  seed has a column, followed by their mean.

  Args:
    metrics: as in `metrics_of`.
    rows: the settings that identify a row, "section.key"; if empty, all in
      which the runs differ, except the seeds and `columns`.
    columns: the settings by which the columns are divided.

  Raises:
    UserError: a setting or score is unknown; or runs of one cell differ in
      another setting, or not at all.
  """
  known = [
    _Known(run, settings, scores_of(run))
    for run, settings in zip(runs, _settings(runs), strict=True)
    if settings  # Else its config.json is damaged.
  ]
  names = dict.fromkeys(key for one in known for key in one.settings)
  for key in (*rows, *columns):
    sections.check_key(key, names)
  shown = rows or _apart(known, columns)
  _check_cells(known, (*shown, *columns))
  lines = list(_groups(known, shown))
  lines = _ordered(lines) if rows else lines
  apart = [key for key in columns if key not in grouping.SEEDS]
  seeds = [key for key in columns if key in grouping.SEEDS]
  made = []
  for name in metrics_of(runs, metrics):
    for values, some in _ordered(_groups(known, apart)):
      whole = _column(lines, some, name, values)
      by_seed = _ordered(_groups(some, seeds))
      if seeds:
        made += [
          _column(lines, of_seed, name, values, seed)
          for seed, of_seed in by_seed
        ]
      if not seeds or whole.is_mean:
        made.append(whole)
  return Pivot([values for values, _ in lines], made)


def _groups(known: Sequence[_Known], keys: Sequence[str]) -> Iterator[_Values]:
  """The groups of runs by these settings, in the order of the runs."""
  found: dict[str, _Values] = {}
  for one in known:
    values = one.values(keys)
    found.setdefault(repr(values), (values, []))[1].append(one)
  yield from found.values()


def _ordered(groups: Iterable[_Values]) -> list[_Values]:
  """Groups in the order of their settings.

  Values of a setting ascend if all are numbers; otherwise they are in the order
  of the runs.
  """
  found = list(groups)
  places: list[list[Any]] = [[] for _ in found]
  for key in found[0][0] if found else ():
    values = [values[key] for values, _ in found]
    if not all(isinstance(value, int | float) for value in values):
      values = [values.index(value) for value in values]
    for place, value in zip(places, values, strict=True):
      place.append(value)
  return [found[at] for at in sorted(range(len(found)), key=places.__getitem__)]


def _column(
  lines: Sequence[tuple[Mapping[str, Any], Sequence[_Known]]],
  some: Sequence[_Known],
  metric: str,
  settings: Mapping[str, Any],
  seeds: Mapping[str, Any] = {},
) -> Column:
  """The column of a metric over some of the runs."""
  here = {id(one) for one in some}

  def cell(of_line: Sequence[_Known]) -> grouping.Spread | None:
    its = [one for one in of_line if id(one) in here]
    found = grouping.spread(
      {one.seed: one.scores[metric] for one in its if metric in one.scores}
    )
    if found is None:
      return None
    missing = (x.run.directory for x in its if x.seed not in found.seeds)
    return found._replace(missing=tuple(map(str, missing)))

  cells = [cell(of_line) for _, of_line in lines]
  return Column(metric, settings, seeds, cells)


def _apart(known: Iterable[_Known], keys: Iterable[str]) -> list[str]:
  """What distinguishes experiments, besides some settings and the seeds."""
  known_already = {*keys, *grouping.SEEDS, *_PATHS}
  return [
    key
    for key in _varying(one.settings for one in known)
    if key not in known_already
    and (key.startswith("eval.") or workdir_lib.binds(key, "train"))
  ]


def _check_cells(known: Sequence[_Known], keys: Sequence[str]) -> None:
  """Raises UserError if the runs of a cell are not seeds of one experiment."""
  for values, some in _groups(known, keys):
    if others := _apart(some, keys):
      where = ", ".join(f"{key}={value}" for key, value in values.items())
      raise UserError(
        f"{others[0]} differs between the runs of {where or 'the table'}; add"
        " it to --rows or --columns"
      )
    first: dict[int | str, _Known] = {}
    for one in some:
      twin = first.setdefault(one.seed, one) if one.run.done else one
      if twin is not one:
        raise UserError(
          f"{twin.run.directory} and {one.run.directory} have the same settings"
          " and the same seed; leave one of them out"
        )
