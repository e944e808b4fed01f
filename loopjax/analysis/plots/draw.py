"""Common parts of all figures.

Does not use pyplot, to change no global state.
"""

import pathlib

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
RED, PURPLE, GREY = "#d55e00", "#8e5ea2", "#7f7f7f"
PALETTE = (
  BLUE, ORANGE, GREEN, RED, PURPLE, GREY, "#56b4e9", "#b5a400", "#e377c2",
  "#000000",
)  # fmt: skip

_MARKERS = ("o", "s", "^", "D", "v", "P")
SCORE_COLORS = (GREEN, PURPLE)  # Colours of a task's scores.
MOST_LINES = 8  # Per panel: more would hide each other.


def new(width: float, height: float) -> figure_lib.Figure:
  """An empty figure of this size in inches, with automatic layout."""
  figure = figure_lib.Figure(figsize=(width, height), layout="constrained")
  figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
  return figure


def panels(
  figure: figure_lib.FigureBase, number: int, across: int
) -> list[axes_lib.Axes]:
  """Axes in rows of `across`."""
  shape = -(-number // across), across
  grid = figure.subplots(*shape, squeeze=False).ravel()
  for axes in grid[number:]:
    axes.set_visible(False)
  return list(grid[:number])


def grid(
  number: int, across: int, width: float, height: float, more: float = 0.0
) -> tuple[figure_lib.Figure, list[axes_lib.Axes]]:
  """A figure of panels of this size in inches; `more` is room in height."""
  figure = new(width * across, height * -(-number // across) + more)
  return figure, panels(figure, number, across)


def color(number: int) -> str:
  """A colour of the palette; where they repeat, `marker` differs."""
  return PALETTE[number % len(PALETTE)]


def marker(number: int) -> str:
  """The marker of a line of this number; the first colours share one."""
  return _MARKERS[number // len(PALETTE) % len(_MARKERS)]


def save(figure: figure_lib.Figure, path: pathlib.Path) -> pathlib.Path:
  """Writes a PNG; returns its path."""
  figure.savefig(path, dpi=120, facecolor="white")
  return path


def tidy(axes: axes_lib.Axes, title: str, x: str, y: str) -> None:
  """Sets title, labels and a light grid; removes the top and right frame."""
  axes.set_title(title, fontsize=11, loc="left")
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.grid(color="0.92")
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)
