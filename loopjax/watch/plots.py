"""Line plots in Braille characters, each of which has two by four dots."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from loopjax.watch.runs import Line

COLORS = ("cyan", "yellow", "green", "magenta", "red", "blue")
_BLANK = 0x2800  # The empty Braille character; each dot adds a bit.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL = 7  # Width of the axis labels at the left, in characters.


class Limits(NamedTuple):
  """The range of x and y that a plot shows."""

  left: float
  right: float
  bottom: float
  top: float


def limits(lines: Sequence[Line]) -> Limits:
  """The range of all lines; never empty."""
  x = np.concatenate([line.x for line in lines])
  y = np.concatenate([line.y for line in lines])
  bottom, top = float(y.min()), float(y.max())
  if bottom == top:  # A constant line is drawn in the middle.
    bottom, top = bottom - 0.5, top + 0.5
  left, right = float(x.min()), float(x.max())
  return Limits(left, right if right > left else left + 1, bottom, top)


def plot(
  lines: Sequence[Line], width: int, height: int, within: Limits
) -> Text:
  """A plot with its range and a legend, as lines of text.

  Args:
    lines: the lines; colours repeat if there are more lines than colours.
    width, height: size of the plot in characters, with its labels and without
      the legend.
    within: the range to show.
  """
  columns = max(width - _LABEL - 1, 1)
  cells, colors = draw(lines, columns, height, within)
  text = Text(no_wrap=True)
  for row in range(height):
    number = {0: within.top, height - 1: within.bottom}.get(row)
    label = "" if number is None else f"{number:.3g}"
    text.append(f"{label:>{_LABEL}} ", style="dim")
    for cell, color in zip(cells[row], colors[row], strict=True):
      style = COLORS[color % len(COLORS)] if color >= 0 else ""
      text.append(chr(_BLANK + cell), style=style)
    text.append("\n")
  text.append(" " * (_LABEL + 1))
  for index, line in enumerate(lines):
    text.append(f"{line.label} ", style=COLORS[index % len(COLORS)])
    text.append(f"{line.y[-1]:.4g}  ")
  return text


def draw(
  lines: Sequence[Line], columns: int, rows: int, within: Limits
) -> tuple[np.ndarray, np.ndarray]:
  """Draws lines on a grid of characters.

  Returns:
    (bits of each character's dots, int [rows, columns]; index of the line drawn
    in each character, the last one where lines cross, -1 for none).
  """
  cells = np.zeros((rows, columns), int)
  colors = np.full((rows, columns), -1)
  for index, line in enumerate(lines):
    for x, y in _dots(line, 2 * columns, 4 * rows, within):
      cells[y // 4, x // 2] |= _BITS[y % 4][x % 2]
      colors[y // 4, x // 2] = index
  return cells, colors


def _dots(
  line: Line, width: int, height: int, within: Limits
) -> list[tuple[int, int]]:
  """The dots of a line, connected; (0, 0) is at the top left."""
  x = (line.x - within.left) / (within.right - within.left)
  y = (within.top - line.y) / (within.top - within.bottom)
  x = np.clip(np.rint(x * (width - 1)), 0, width - 1).astype(int)
  y = np.clip(np.rint(y * (height - 1)), 0, height - 1).astype(int)
  dots = [(int(x[0]), int(y[0]))]
  for i in range(1, len(x)):
    count = max(abs(x[i] - x[i - 1]), abs(y[i] - y[i - 1]), 1) + 1
    across = np.rint(np.linspace(x[i - 1], x[i], count)).astype(int).tolist()
    down = np.rint(np.linspace(y[i - 1], y[i], count)).astype(int).tolist()
    dots += zip(across, down, strict=True)
  return dots
