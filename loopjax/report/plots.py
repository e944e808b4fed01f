"""Plots of our numbers next to the paper's."""

import io
import math
import re
from collections.abc import Sequence

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib

from loopjax.analysis import draw, series
from loopjax.report import paper as paper_lib
from loopjax.report import tables
from loopjax.run import workdir as workdir_lib

_MAX_PANELS = 2


def numeric_key(groups: Sequence[tables.Group]) -> str | None:
  """The key that a sweep varies, if it is the only one and numeric."""
  keys = tables.varying(groups)
  if len(keys) != 1:
    return None
  values = [group.overrides.get(keys[0]) for group in groups]
  numbers = all(type(value) in (int, float) for value in values)
  return keys[0] if numbers else None


def draw_curve(
  groups: Sequence[tables.Group], sweep: paper_lib.Sweep, key: str
) -> bytes | None:
  """Draws the first quantities against the key; None if there are no runs.

  Args:
    groups: of the sweep.
    sweep: its columns and the paper's rows.
    key: from `numeric_key`.

  Returns:
    A PNG.
  """
  groups = sorted(groups, key=lambda group: group.overrides[key])
  columns = [
    column
    for column in sweep.columns
    if any(tables.ours(group, column) for group in groups)
  ][:_MAX_PANELS]
  if not columns:
    return None
  figure = draw.new(4.6 * len(columns), 3.3)
  panels = figure.subplots(1, len(columns), squeeze=False)[0]
  for axes, column in zip(panels, columns, strict=True):
    draw.tidy(axes, column.label, key.partition(".")[2], "")
    axes.set_xticks(
      range(len(groups)), [f"{group.overrides[key]:g}" for group in groups]
    )
    _points(axes, "ours", [tables.ours(g, column) for g in groups])
    rows = [tables.row_of(group.settings, sweep.rows) for group in groups]
    numbers = [row.values.get(column.key) if row else None for row in rows]
    _points(axes, "paper", numbers)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
  return _png(figure)


def draw_panels(
  groups: Sequence[tables.Group], panels: Sequence[paper_lib.Panel]
) -> bytes | None:
  """Draws the curves of all items, overlaid.

  Args:
    groups: of the sweep; a group has one colour, each of its runs one line.
    panels: of the sweep; those without a curve are left out.

  Returns:
    A PNG; None if there is no curve.
  """
  keys = tables.varying(groups)
  drawn = [(panel, _curves(groups, panel)) for panel in panels]
  drawn = [(panel, curves) for panel, curves in drawn if curves]
  if not drawn:
    return None
  num_rows = -(-len(drawn) // _MAX_PANELS)
  figure = draw.new(4.6 * _MAX_PANELS, 3.3 * num_rows)
  grid = figure.subplots(num_rows, _MAX_PANELS, squeeze=False).ravel()
  for axes in grid[len(drawn) :]:
    axes.set_visible(False)
  for axes, (panel, curves) in zip(grid, drawn, strict=False):
    unit = "examples seen" if panel.over == "examples" else "loops"
    draw.tidy(axes, panel.title, unit, "")
    for group, name, x, y in curves:
      overrides = groups[group].overrides
      changed = {
        key: overrides[key]
        for key in keys
        if key in overrides and key not in panel.settings
      }
      label = tables.as_text(changed) or "as the config is"
      known = axes.get_legend_handles_labels()[1]
      axes.plot(
        x,
        y,
        color=draw.PALETTE[group % len(draw.PALETTE)],
        linestyle="--" if name else "-",
        linewidth=1.2,
        label=None if name or label in known else label,
      )
    axes.legend(frameon=False, fontsize=8)
  return _png(figure)


def _curves(
  groups: Sequence[tables.Group], panel: paper_lib.Panel
) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
  """(group, name, x, y) of every curve that a completed run has."""
  curves = []
  for number, group in enumerate(groups):
    if not tables.fits(panel.settings, group.settings):
      continue
    for run in filter(lambda run: run.done, group.runs):
      read = _over_examples if panel.over == "examples" else _over_loops
      for place, name in enumerate(panel.names):
        x, y = read(run, name)
        if len(x):
          curves.append((number, place, x, panel.factor * y))
  return curves


def _over_examples(run: tables.Run, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Examples seen, and the values of "split/metric" there."""
  split, _, metric = name.partition("/")
  rows = workdir_lib.read_metrics(run.directory)
  steps, values = series.of(rows, split, metric)
  return steps * run.config["run"]["batch_size"], values


def _over_loops(run: tables.Run, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Loops run, from 1, and the values of the read-out after each."""
  pattern = re.compile(rf"{re.escape(name)}/loop=(\d+)")
  found = sorted(
    (int(match[1]) + 1, value)
    for key, value in run.summary["metrics"].items()
    if (match := pattern.fullmatch(key))
  )
  loops, values = zip(*found, strict=True) if found else ((), ())
  return np.asarray(loops, int), np.asarray(values, float)


def _png(figure: figure_lib.Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=120, facecolor="white")
  return buffer.getvalue()


def _points(
  axes: axes_lib.Axes,
  label: str,
  numbers: Sequence[tables.Spread | paper_lib.Number | None],
) -> None:
  """A line through the means and a small mark for every seed."""
  color, marker, line, side = {
    "ours": (draw.BLUE, "o", "-", -0.06),
    "paper": (draw.ORANGE, "s", "--", 0.06),
  }[label]
  # A missing mean interrupts the line.
  means = [n.mean if n and n.mean is not None else math.nan for n in numbers]
  stds = [n.std or 0.0 if n else 0.0 for n in numbers]
  known = not all(map(math.isnan, means))
  seeds = [
    (x + side, value)
    for x, number in enumerate(numbers)
    if number and len(number.seeds) > 1
    for value in number.seeds.values()
  ]
  if known:
    axes.errorbar(
      [x + side for x in range(len(means))],
      means,
      stds,
      color=color,
      marker=marker,
      markersize=5,
      linestyle=line,
      capsize=3,
      label=label,
    )
  if seeds:
    axes.scatter(
      *zip(*seeds, strict=True),
      s=20,
      color=color,
      alpha=0.5,
      marker=marker,
      linewidth=0,
      label=None if known else label,
    )
