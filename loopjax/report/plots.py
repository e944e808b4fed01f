"""Plots of our numbers next to the paper's."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import ticker

from loopjax.analysis.plots import draw, series
from loopjax.report import grouping, papers, quantities, records
from loopjax.report import runs as runs_lib

FORMATS = (".png", ".pdf", ".svg")  # Endings of `draw_pivot`'s files.
_MAX_PANELS = 2
_SIZE = 4.6, 3.3  # Of a panel, in inches.
_MARKS = 12  # On a line, about.
_LINE = 75  # Characters of a legend, side by side, below a panel.
_UNITS = {
  "examples": "examples seen", "loops": "loops",
  "validation/loss": "validation loss, nats per token",
}  # fmt: skip


def numeric_key(groups: Sequence[grouping.Group]) -> str | None:
  """The setting that a sweep varies, if it is numeric and the only one."""
  keys = grouping.varying(groups)
  if len(keys) != 1:
    return None
  values = [group.overrides.get(keys[0]) for group in groups]
  numbers = all(type(value) in (int, float) for value in values)
  return keys[0] if numbers else None


def draw_curve(
  groups: Sequence[grouping.Group], sweep: papers.Sweep
) -> bytes | None:
  """A PNG of the first columns against the only setting that varies.

  None if it is not a number, others vary, or there are no runs.
  """
  key = numeric_key(groups)
  if not key:
    return None
  groups = sorted(groups, key=lambda group: group.overrides[key])
  columns = [
    column
    for column in sweep.columns
    if any(grouping.ours(group, column) for group in groups)
  ][:_MAX_PANELS]
  if not columns:
    return None
  figure, grid = draw.grid(len(columns), len(columns), *_SIZE)
  for axes, column in zip(grid, columns, strict=True):
    draw.tidy(axes, column.label, grouping.words(key), "")
    axes.set_xticks(
      range(len(groups)), [f"{group.overrides[key]:g}" for group in groups]
    )
    rows = [grouping.row_of(group.settings, sweep.rows) for group in groups]
    ours = [grouping.ours(group, column) for group in groups]
    theirs = [row.values.get(column.key) if row else None for row in rows]
    shift = 0.06 if any(theirs) else 0.0  # Beside each other.
    for label, numbers, color, style in (
      ("ours", ours, draw.BLUE, ("o", "-", -shift)),
      ("paper", theirs, draw.ORANGE, ("s", "--", shift)),
    ):
      stds = [number and number.std for number in numbers]
      _points(axes, numbers, stds, color, label + _num_seeds(numbers), *style)
    axes.set_xlim(-0.4, len(groups) - 0.6)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
  return _png(figure)


def draw_panels(
  groups: Sequence[grouping.Group], sweep: papers.Sweep
) -> tuple[bytes, str] | None:
  """A PNG of the curves of all items, overlaid, and its caption.

  A group has one colour, each of its runs one line, and the name of the paper's
  row if it is the only one of that row. In plots over a setting, lines connect
  groups. Panels without a curve are not drawn; None if there is no curve.
  """
  drawn = [
    (
      panel,
      by_setting(groups, panel)
      if "." in panel.over
      else by_run(groups, panel, sweep.rows),
    )
    for panel in sweep.panels
  ]
  drawn = [(panel, curves) for panel, curves in drawn if curves]
  if not drawn:
    return None
  across = min(len(drawn), _MAX_PANELS)
  labels = {curve.label for _, curves in drawn for curve in curves}
  # A legend has room below the panels for this many entries side by side.
  room = _LINE * across
  wrapped = {label: textwrap.fill(label, room) for label in labels}
  num_columns = max(1, room // (min(room, max(map(len, labels))) + 6))
  lines = sum(text.count("\n") + 1 for text in wrapped.values())
  below = 0.22 * -(-lines // num_columns)
  figure, grid = draw.grid(len(drawn), across, *_SIZE, below)
  for axes, (panel, curves) in zip(grid, drawn, strict=True):
    unit = _UNITS.get(panel.over) or grouping.words(panel.over)
    draw.tidy(axes, panel.title, unit, "")
    whole = all(np.array_equal(c.x, np.rint(c.x)) for c in curves)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=whole))
    if panel.over == "examples":
      axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    elif "/" in panel.over:  # Training goes to the right.
      axes.invert_xaxis()
    if panel.band:
      _bands(axes, panel, groups)
    for curve in curves:
      is_marked = "." in panel.over or curve.color >= len(draw.PALETTE)
      known = axes.get_legend_handles_labels()[1]
      axes.plot(
        curve.x,
        curve.y,
        color=draw.color(curve.color),
        linestyle="--" if curve.dashed else "-",
        marker=draw.marker(curve.color) if is_marked else None,
        markevery=max(len(curve.x) // _MARKS, 1),
        ms=4,
        linewidth=1.2,
        label=None if curve.dashed or curve.label in known else curve.label,
      )
    if _from_zero(panel):
      axes.set_ylim(bottom=0)
  entries: dict[str, Any] = {}
  for axes in grid:
    handles, known = axes.get_legend_handles_labels()
    entries = dict(zip(known, handles, strict=True)) | entries
  figure.legend(
    entries.values(),
    [wrapped.get(label, label) for label in entries],
    loc="outside lower center",
    ncols=num_columns,
    frameon=False,
    fontsize=8,
  )
  return _png(figure), _caption([panel for panel, _ in drawn])


def draw_pivot(pivot: records.Pivot, setting: str) -> figure_lib.Figure:
  """Scores against the setting of the rows, a panel for each score.

  A line for each column connects its means, whose bars are 95 % intervals;
  small marks are single runs.
  """
  rows = [str(row[setting]) for row in pivot.rows]  # Numbers ascend.
  panels: dict[str, list[records.Column]] = {}
  for column in pivot.columns:
    panels.setdefault(column.metric, []).append(column)
  across = min(len(panels), _MAX_PANELS)
  figure, grid = draw.grid(len(panels), across, *_SIZE)
  for axes, (metric, columns) in zip(grid, panels.items(), strict=True):
    draw.tidy(axes, metric, grouping.words(setting), "")
    axes.set_xticks(range(len(rows)), rows)
    for number, column in enumerate(columns):
      label = grouping.as_text(column.settings)
      intervals = [cell and cell.interval for cell in column.cells]
      look = draw.color(number), label, draw.marker(number)
      _points(axes, column.cells, intervals, *look)
    if any(axes.get_legend_handles_labels()[1]):
      axes.legend(frameon=False, fontsize=9)
  return figure


def _caption(panels: Sequence[papers.Panel]) -> str:
  """What the panels show, in words."""
  over = {panel.over: None for panel in panels}
  axes = " or ".join(_UNITS.get(x) or grouping.words(x) for x in over)
  dashed = any(len(panel.names) > 1 for panel in panels)
  away = [panel.title for panel in panels if not _from_zero(panel)]
  means = all("." in x for x in over)
  lines = "means" if means else "one line per run, one colour per setting"
  parts = [
    f"Our runs, over {axes}: {lines}.",
    "Dashed lines are the second score of a panel." if dashed else "",
    f"Vertical axes that do not start at 0: {', '.join(away)}." if away else "",
  ]
  return " ".join(filter(None, parts))


def _from_zero(panel: papers.Panel) -> bool:
  """Shares begin at 0, losses where they are."""
  return panel.factor == 100.0


def _bands(
  axes: axes_lib.Axes, panel: papers.Panel, groups: Sequence[grouping.Group]
) -> None:
  """Where the paper's mean and deviation are on the axis, and where ours."""
  assert panel.band
  mean, deviation, name = panel.band
  function = quantities.FUNCTIONS[name]
  runs = [run for group in groups for run in group.runs if run.done]
  ours = np.concatenate([function(run) for run in runs])
  found = [("paper", draw.ORANGE, mean, deviation)]
  if len(ours) > 1:
    found.append(("ours", draw.BLUE, ours.mean(), ours.std(ddof=1)))
  for whose, color, middle, spread in found:
    low, high = middle - spread, middle + spread
    text = f"{whose}: {middle:.2f} ± {spread:.2f}"
    axes.axvspan(low, high, color=color, alpha=0.15, label=text, linewidth=0)


def _png(figure: figure_lib.Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=120, facecolor="white")
  return buffer.getvalue()


_Numbers = Sequence[grouping.Spread | papers.Number | None]


def _points(
  axes: axes_lib.Axes,
  numbers: _Numbers,
  errors: Sequence[float | None],
  color: str,
  label: str,
  marker: str = "o",
  line: str = "-",
  shift: float = 0.0,
) -> None:
  """A line through means with errors, and a small mark for every seed."""
  # A missing mean interrupts the line.
  means = [n.mean if n and n.mean is not None else math.nan for n in numbers]
  places = [place + shift for place in range(len(numbers))]
  seeds = [
    (place, value)
    for place, number in zip(places, numbers, strict=True)
    if number and len(number.seeds) > 1
    for value in number.seeds.values()
  ]
  if not seeds and all(map(math.isnan, means)):
    return
  axes.errorbar(
    places,
    means,
    [error or 0.0 for error in errors],
    color=color,
    marker=marker,
    markersize=5,
    linestyle=line,
    capsize=3,
    label=label or None,
  )
  if seeds:
    axes.scatter(
      *zip(*seeds, strict=True), s=15, color=color, alpha=0.5, marker=marker
    )


def _num_seeds(numbers: _Numbers) -> str:
  """ ", 1 seed" or ", 1 to 3 seeds"; "" if the numbers have none."""
  counts = {len(number.seeds) for number in numbers if number and number.seeds}
  if not counts:
    return ""
  n = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
  return f", {n} seed{'s' * (n != '1')}"


class Curve(NamedTuple):
  """A line of a panel; `color` is a number."""

  color: int
  label: str
  dashed: bool
  x: np.ndarray
  y: np.ndarray


def by_run(
  groups: Sequence[grouping.Group],
  panel: papers.Panel,
  rows: Sequence[papers.Row],
) -> list[Curve]:
  """Every curve that a completed run has; groups differ in colour."""
  keys = grouping.distinguishing(groups)
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
    label = grouping.as_text(changed) or grouping.AS_IT_IS
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
  groups: Sequence[grouping.Group], panel: papers.Panel
) -> list[Curve]:
  """Means over seeds against a setting; one line for each value of another."""
  lines: dict[object, list[tuple[float, float]]] = {}
  for group in groups:
    if not grouping.fits(panel.settings, group.settings):
      continue
    column = papers.Column("", "", panel.names[0])
    if found := grouping.ours(group, column):
      place = group.settings[panel.over]
      line = lines.setdefault(group.settings[panel.lines], [])
      line.append((place, panel.factor * found.mean))
  curves = []
  for number, (value, points) in enumerate(lines.items()):
    if len(points) < 2:  # In the table.
      continue
    x, y = np.array(sorted(points), float).T
    label = grouping.as_text({panel.lines: value})
    curves.append(Curve(number, label, False, x, y))
  return curves


def _read(
  run: runs_lib.Run, name: str, over: str
) -> tuple[np.ndarray, np.ndarray]:
  """The points of one curve of a run, see `Panel.over`."""
  if over == "loops":
    return series.by_depth(run.summary["metrics"], name)
  rows = run.rows
  steps, values = series.scalar(rows, *name.split("/", 1))
  if over == "examples":
    return steps * run.config["run"]["batch_size"], values
  other = series.scalar(rows, *over.split("/", 1))
  return series.together(other, (steps, values))
