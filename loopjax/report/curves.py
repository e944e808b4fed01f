"""The curves of runs that a figure of the report lays over each other."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loopjax.analysis.plots import series
from loopjax.report import grouping
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report import settings as settings_lib


class Curve(NamedTuple):
  """A line of a panel; `color` is a number."""

  color: int
  label: str
  dashed: bool
  x: np.ndarray
  y: np.ndarray


def by_run(
  groups: Sequence[grouping.Group],
  panel: paper_lib.Panel,
  rows: Sequence[paper_lib.Row],
) -> list[Curve]:
  """Every curve that a completed run has; groups differ in colour."""
  keys = settings_lib.distinguishing(groups)
  found = [grouping.row_of(group.settings, rows) for group in groups]
  curves = []
  for number, (group, row) in enumerate(zip(groups, found, strict=True)):
    if not grouping.fits(panel.settings, group.settings):
      continue
    changed = {
      key: group.overrides[key]
      for key in keys
      if key in group.overrides and key not in panel.settings
    }
    label = settings_lib.as_text(changed) or settings_lib.AS_IT_IS
    if row and found.count(row) == 1:
      label = row.label
    for run in filter(lambda run: run.done, group.runs):
      for place, name in enumerate(panel.names):
        x, y = _read(run, name, panel.over)
        if len(x) > 1:  # A point is not a curve, and is in the table.
          y = panel.factor * y
          curves.append(Curve(number, label, place > 0, x, y))
  return curves


def by_setting(
  groups: Sequence[grouping.Group], panel: paper_lib.Panel
) -> list[Curve]:
  """Means over seeds against a setting; one line for each value of another."""
  lines: dict[object, list[tuple[float, float]]] = {}
  for group in groups:
    if not grouping.fits(panel.settings, group.settings):
      continue
    column = paper_lib.Column("", "", paper_lib.Metric(panel.names[0]))
    if found := grouping.ours(group, column):
      place = group.settings[panel.over]
      line = lines.setdefault(group.settings[panel.lines], [])
      line.append((place, panel.factor * found.mean))
  curves = []
  for number, (value, points) in enumerate(lines.items()):
    x, y = np.array(sorted(points), float).T
    label = settings_lib.as_text({panel.lines: value})
    curves.append(Curve(number, label, False, x, y))
  return curves


def _read(
  run: runs_lib.Run, name: str, over: str
) -> tuple[np.ndarray, np.ndarray]:
  """The points of one curve of a run."""
  if over == "examples":
    return _over_examples(run, name)
  return _over_loops(run, name) if over == "loops" else _over(run, name, over)


def _over(
  run: runs_lib.Run, name: str, other: str
) -> tuple[np.ndarray, np.ndarray]:
  """Values of one "split/metric", and of another at the same steps."""
  rows = run.rows
  (x_steps, x), (y_steps, y) = (
    series.scalar(rows, *metric.split("/", 1)) for metric in (other, name)
  )
  return x[np.isin(x_steps, y_steps)], y[np.isin(y_steps, x_steps)]


def _over_examples(
  run: runs_lib.Run, name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Examples seen, and the values of "split/metric" there."""
  split, _, metric = name.partition("/")
  rows = run.rows
  steps, values = series.scalar(rows, split, metric)
  return steps * run.config["run"]["batch_size"], values


def _over_loops(run: runs_lib.Run, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of loops, from 1, and the metric of the output after each."""
  pattern = re.compile(rf"{re.escape(name)}/loop=(\d+)")
  found = sorted(
    (int(match[1]) + 1, value)
    for key, value in run.summary["metrics"].items()
    if (match := pattern.fullmatch(key))
  )
  loops, values = zip(*found, strict=True) if found else ((), ())
  return np.asarray(loops, int), np.asarray(values, float)
