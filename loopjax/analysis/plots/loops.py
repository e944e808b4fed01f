"""The figure of `loopjax dynamics`: six panels."""

import pathlib
from typing import Any

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import ticker

from loopjax.analysis.plots import draw

_COLORS = {
  "settles": draw.GREEN, "cycles": draw.PURPLE, "drifts": draw.RED,
  "undecided": draw.GREY,
}  # fmt: skip


def draw_dynamics(found: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes the panels of `analysis.dynamics.Dynamics`; returns the path."""
  figure, axes = draw.grid(6, 3, 4.4, 3.3)
  verdicts = [one["verdict"] for one in found.examples]
  change = found.column("relative_change")
  change = np.where(change > 0, change, np.nan)  # For a logarithm.
  _lines(axes[0], change, verdicts)
  axes[0].set_yscale("log")
  draw.tidy(
    axes[0], "Change of the state by a loop", "loops run", "of its norm"
  )
  handles, labels = axes[0].get_legend_handles_labels()
  axes[0].legend(handles, labels, fontsize=8, edgecolor="none")
  _lines(axes[1], found.column("cosine_to_last"), verdicts)
  draw.tidy(axes[1], "Cosine to the last state", "loops run", "cosine")
  _draw_jacobian(axes[2], found)
  _draw_lens(axes[3], found)
  _draw_verdicts(axes[4], found)
  _draw_positions(axes[5], found)
  for panel in (axes[0], axes[1], axes[3]):
    panel.axvline(found.trained_loops, color=draw.GREY, linestyle=":")
    panel.set_xlim(0, found.num_loops)
    panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  return draw.save(figure, path)


def _lines(
  axes: axes_lib.Axes, values: np.ndarray, verdicts: list[str]
) -> None:
  """A thin line for each example, in the colour of its verdict."""
  loops = np.arange(1, len(values) + 1)
  for name, color in _COLORS.items():
    chosen = [b for b, verdict in enumerate(verdicts) if verdict == name]
    if chosen:
      lines = axes.plot(
        loops, values[:, chosen], color=color, alpha=0.4, linewidth=0.8
      )
      lines[0].set_label(f"{name}: {len(chosen)}")


def _draw_jacobian(axes: axes_lib.Axes, found: Any) -> None:
  """Largest singular value over spectral radius, with their errors."""
  of = {
    name: [x.get(name) for x in found.examples] for name in found.examples[0]
  }
  axes.errorbar(
    of["spectral_radius"],
    of["singular_value"],
    xerr=of["spectral_radius/error"],
    yerr=of["singular_value/error"],
    fmt="none",
    ecolor="0.8",
    zorder=1,
  )
  axes.scatter(
    of["spectral_radius"],
    of["singular_value"],
    c=[_COLORS[x] for x in of["verdict"]],
    s=14,
    zorder=2,
  )
  axes.axvline(1, color=draw.GREY, linestyle=":")
  draw.tidy(
    axes,
    "Jacobian of one more loop",
    "spectral radius",
    "largest singular value",
  )


def _draw_lens(axes: axes_lib.Axes, found: Any) -> None:
  """Means of what is read out after each loop."""
  colors = {"right": draw.GREEN, "confidence": draw.BLUE, "loss": draw.ORANGE}
  lines: list[Any] = []
  for name, color in colors.items():
    values = found.column(name)
    if values.size:
      panel = axes.twinx() if name == "loss" else axes
      words = {"right": "tokens right", "loss": "loss, nats (right axis)"}
      lines += panel.plot(
        np.arange(1, len(values) + 1),
        values.mean(axis=1),
        color=color,
        label=words.get(name, name),
      )
  draw.tidy(axes, "Read out after each loop", "loops run", "share")
  if lines:
    axes.legend(handles=lines, fontsize=8, edgecolor="none", loc="center right")
  else:
    _nothing(axes, "not read out")


def _draw_verdicts(axes: axes_lib.Axes, found: Any) -> None:
  """Settled by right, or the verdicts."""
  table = found.table() if found.has_answers else {}
  if table:
    cells = np.reshape(list(table.values()), (2, 2))
    axes.imshow(cells, cmap="Greens", vmin=0, vmax=2 * max(cells.max(), 1))
    for (row, column), number in np.ndenumerate(cells):
      axes.text(column, row, str(number), ha="center", va="center")
    axes.set_xticks((0, 1), ("right", "wrong"))
    axes.set_yticks((0, 1), ("settled", "not settled"))
    axes.set_title("Examples", fontsize=11, loc="left")
    return
  names = list(_COLORS)
  numbers = [[x["verdict"] for x in found.examples].count(n) for n in names]
  axes.bar(names, numbers, color=[*_COLORS.values()])
  draw.tidy(axes, "Examples", "", "number")


def _draw_positions(axes: axes_lib.Axes, found: Any) -> None:
  """What an edit of one position does to the state and to the answer."""
  places = [one["position"] for one in found.positions]
  for kind, color in (("noise", draw.BLUE), ("patch", draw.RED)):
    for name, style in (("state", "-"), ("answer", ":")):
      key = f"{kind}/{name}"
      if found.positions and key in found.positions[0]:
        values = [one[key] for one in found.positions]
        axes.plot(places, values, style, color=color, label=key)
  draw.tidy(axes, "Edits of one position", "position", "change")
  if places:
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # Room for the legend.
    axes.legend(fontsize=8, edgecolor="none", loc="upper left", ncols=2)
  else:
    _nothing(axes, "loops run anew for each part of a row")


def _nothing(axes: axes_lib.Axes, why: str) -> None:
  axes.text(0.5, 0.5, why, ha="center", transform=axes.transAxes, color="0.5")
