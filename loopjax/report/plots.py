"""Pictures of ours beside the paper's."""

import io
import math
from collections.abc import Sequence

from matplotlib import axes as axes_lib

from loopjax.analysis import draw
from loopjax.report import paper as paper_lib
from loopjax.report import tables

_MAX_PANELS = 2


def numeric_key(groups: Sequence[tables.Group]) -> str | None:
  """The key that a sweep varies, if there is one only and it is a number."""
  keys = tables.varying(groups)
  if len(keys) != 1:
    return None
  values = [group.overrides.get(keys[0]) for group in groups]
  numbers = all(type(value) in (int, float) for value in values)
  return keys[0] if numbers else None


def draw_curve(
  groups: Sequence[tables.Group], sweep: paper_lib.Sweep, key: str
) -> bytes | None:
  """Draws the first quantities against the key; None if nothing was run.

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
    rows = [tables.row_of(group.overrides, sweep.rows) for group in groups]
    numbers = [row.values.get(column.key) if row else None for row in rows]
    _points(axes, "paper", numbers)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
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
  # A mean that is not there interrupts the line.
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
