"""Runs as tidy records, and one setting against another as a table.

`loopjax.table`, the command `loopjax table` and report.csv are these records.
"""

import fnmatch
import functools
import glob
import operator
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

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
    cells: the number of each row over the runs there, by their paths; None
      without any.
  """

  metric: str
  settings: Mapping[str, Any]
  seeds: Mapping[str, Any]
  cells: list[grouping.Spread | None]

  @property
  def label(self) -> str:
    """Its metric, settings and seeds: `test/loss, model.num_loops=4`."""
    of = {**self.settings, **self.seeds}
    return ", ".join([self.metric, *(f"{k}={v}" for k, v in of.items())])

  @property
  def is_mean(self) -> bool:
    """Whether a cell is the mean of several runs."""
    return any(cell and len(cell.seeds) > 1 for cell in self.cells)

  @property
  def missing(self) -> list[str]:
    """The paths of runs that lack a number that others of their cell have."""
    return [path for cell in self.cells if cell for path in cell.missing]

  def values(self, place: int) -> dict[str, Any]:
    """The values of a row, by the names of their columns."""
    cell = self.cells[place]
    found: dict[str, Any] = {self.label: cell and cell.mean}
    if self.is_mean or self.missing:
      found[f"{self.label}/interval"] = cell and cell.interval
      found[f"{self.label}/runs"] = len(cell.seeds) if cell else 0
    if self.missing:
      found[f"{self.label}/missing"] = " ".join(cell.missing if cell else ())
    return found


class Pivot(NamedTuple):
  """Scores by settings.

  Attributes:
    rows: the values of the settings that each row has, "section.key".
    columns: the numbers.
  """

  rows: list[dict[str, Any]]
  columns: list[Column]

  def cells(self) -> list[dict[str, Any]]:
    """A dict per row: its settings, and a `Spread` for each column."""
    return [
      row | {column.label: column.cells[place] for column in self.columns}
      for place, row in enumerate(self.rows)
    ]

  def records(self) -> list[dict[str, Any]]:
    """A dict per row; a mean has its interval and number of runs beside it.

    Where runs have no number, their paths are beside the number of the others.
    """
    return [
      functools.reduce(operator.or_, [c.values(at) for c in self.columns], row)
      for at, row in enumerate(self.rows)
    ]


def read(places: Iterable[str | os.PathLike[str]]) -> list[runs_lib.Run]:
  """The runs of work directories, sweeps, stored runs, and folders of these.

  The runs that a sweep has planned are among them. Each run is there once, in
  the order of the places: paths, patterns of paths (what they match besides
  runs is left out), or zoo:NAME.
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


def scores_of(run: runs_lib.Run) -> dict[str, float]:
  """A run's final scores and FACTS by name; none if it is not complete."""
  facts = {name: run.summary[name] for name in FACTS if name in run.summary}
  return {**run.summary.get("metrics", {}), **facts}


def _varying(table: pd.DataFrame) -> list[str]:
  """The settings in which runs differ, by section.

  Without the settings of a single family or task whose runs all have the same
  value: they follow from its name.
  """
  known = [key.partition(".")[0] for key in table]
  found = [key for key in table if table[key].dropna().map(repr).nunique() > 1]
  return sorted(found, key=lambda key: known.index(key.partition(".")[0]))


def metrics_of(
  runs: Sequence[runs_lib.Run], wanted: Sequence[str] = ()
) -> list[str]:
  """The names of the scores that are wanted, in order.

  They are names or patterns such as "depth/loss/loop=*"; if empty, all scores
  except training's, standard errors, and those of groups and loops.
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
  table, names = _table(runs), metrics_of(runs, metrics)
  # By path: pandas 2 has no records of a table without columns.
  settings = table[_varying(table)].to_dict("index").values()
  scores = map(scores_of, runs)
  return [
    {"run": run.directory.as_posix(), "state": run.state}
    | its
    | {name: found.get(name) for name in names}
    for run, its, found in zip(runs, settings, scores, strict=True)
  ]


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
  """
  known = [run for run in runs if settings_of(run)]  # Else it is damaged.
  table = _table(known)
  for key in (*rows, *columns):
    sections.check_key(key, dict.fromkeys(table))
  shown = list(rows) or _apart(table, columns)
  _check_cells(table[[run.done for run in known]], table, [*shown, *columns])
  scores = pd.DataFrame([scores_of(run) for run in known], table.index)
  lines = list(_groups(table, shown, ordered=bool(rows)))
  seeds = [key for key in columns if key in grouping.SEEDS]
  settings = [key for key in columns if key not in seeds]

  def column(
    name: str,
    some: pd.DataFrame,
    settings: Mapping[str, Any],
    seed: Mapping[str, Any],
  ) -> Column:
    values = scores.get(name, pd.Series(np.nan, table.index))[some.index]
    cells = [
      grouping.spread(values[values.index.isin(line.index)])
      for _, line in lines
    ]
    return Column(name, settings, seed, cells)

  parts = [
    (values, some, list(_groups(some, seeds)) if seeds else [])
    for values, some in _groups(table, settings)
  ]
  made = []
  for name in metrics_of(runs, metrics):
    for values, some, by_seed in parts:
      whole = column(name, some, values, {})
      made += [column(name, part, values, seed) for seed, part in by_seed]
      if not by_seed or whole.is_mean:
        made.append(whole)
  return Pivot([values for values, _ in lines], made)


def _table(runs: Sequence[runs_lib.Run]) -> pd.DataFrame:
  """The settings of runs, by path, with their data where they tell them apart.

  None where a run lacks a setting.
  """
  settings = [
    settings_of(run) | ({runs_lib.DATA: data} if data else {})
    for run, data in zip(runs, runs_lib.data_apart(runs), strict=True)
  ]
  paths = [str(run.directory) for run in runs]
  table = pd.DataFrame(settings, paths, dtype=object)
  return table.where(table.notna(), None)


def _groups(
  table: pd.DataFrame, keys: Sequence[str], ordered: bool = True
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
  """The values of these settings, and the runs that have them.

  In the order of the runs; or, if ordered, of the settings: values ascend if
  all are numbers, and are otherwise in the order of the runs.
  """
  if not keys:
    yield {}, table
    return
  ranks = [_ranks(table[key]) for key in keys]
  for _, some in table.groupby(ranks, sort=ordered):
    yield some[list(keys)].iloc[0].to_dict(), some


def _ranks(values: pd.Series) -> pd.Series:
  """The place of each value in the order of `_groups`."""
  if all(isinstance(value, int | float) for value in values):
    return values.astype(float).rank(method="dense")
  return pd.Series(pd.factorize(values.map(repr))[0], values.index)


def _apart(table: pd.DataFrame, keys: Iterable[str]) -> list[str]:
  """What distinguishes experiments, besides some settings and the seeds."""
  known = {*keys, *grouping.SEEDS, *_PATHS}
  return [
    key
    for key in _varying(table)
    if key not in known
    and (key.startswith("eval.") or workdir_lib.binds(key, "train"))
  ]


def _check_cells(
  done: pd.DataFrame, table: pd.DataFrame, keys: Sequence[str]
) -> None:
  """Raises UserError if the runs of a cell are not seeds of one experiment."""
  for values, some in _groups(table, keys, ordered=False):
    if others := _apart(some, keys):
      where = ", ".join(f"{key}={value}" for key, value in values.items())
      raise UserError(
        f"{others[0]} differs between the runs of {where or 'the table'}; add"
        " it to --rows or --columns"
      )
  seeds = [key for key in grouping.SEEDS if key in table and key not in keys]
  for _, twins in _groups(done, [*keys, *seeds], ordered=False):
    if len(twins) > 1:
      raise UserError(
        f"{twins.index[0]} and {twins.index[1]} have the same settings and the"
        " same seed; leave one of them out"
      )


def to_csv(found: Sequence[Mapping[str, Any]]) -> str:
  """Records with the same keys as CSV."""
  return pd.DataFrame(found, dtype=object).to_csv(index=False)


def score(value: float, standard_error: float | None = None) -> str:
  """A score with four digits, and its standard error if it has one."""
  small = abs(value) < 9999.5  # Larger ones would have an exponent.
  text = f"{value:,.4g}" if small else f"{value:,.0f}"
  return f"{text} ± {standard_error:.2g}" if standard_error else text
