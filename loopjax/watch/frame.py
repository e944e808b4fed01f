"""One frame with several runs, side by side if the terminal is wide enough."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loopjax.watch.runs import Line, Run

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
  if bottom == top:  # A constant: from 0 to 1 if it may be a share.
    is_share = 0 <= top <= 1
    half = max(0.5, 1e-3 * abs(top))  # To large numbers 0.5 adds nothing.
    bottom, top = (0.0, 1.0) if is_share else (bottom - half, top + half)
  left, right = float(x.min()), float(x.max())
  return Limits(left, right if right > left else left + 1, bottom, top)


def plot(
  lines: Sequence[Line], width: int, height: int, within: Limits
) -> Text:
  """A plot with its range and a legend, as lines of text.

  Lines consist of Braille characters of 2 x 4 dots.

  Args:
    lines: the lines; colours repeat if there are more lines than colours.
    width, height: size of the plot in characters, including labels, excluding
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
    in each character, the last one if lines cross, -1 for none).
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


_LEAST_WIDTH = 44  # Minimum width of a column, in characters.
_HEIGHT, _LEAST_HEIGHT = 7, 2  # Height of a plot, in lines.
_AROUND = 6  # Maximum lines of a column besides its plots.
# Metrics of a training row shown in the last line, and their formats.
_RATES = {
  "steps_per_second": "{:.3g} steps/s",
  "examples_per_second": "{:.3g} examples/s",
  "data_wait_fraction": "{:.1%} of the time waiting for data",
  "skipped_steps": "{:.0f} steps skipped",
  "learning_rate": "learning rate {:.2g}",
}


def make(
  runs: Sequence[Run], width: int, height: int | None = None
) -> RenderableType:
  """Lays out the runs; plots of the same metric have the same range.

  Args:
    runs: runs from `runs.read`.
    width: width of the terminal, in characters.
    height: its height in lines, which the frame must fit: plots shrink; then
      ended runs shrink to a line each, below the others, and columns have fewer
      plots. None for no limit.
  """
  ended = [run for run in runs if run.ended]
  high, most = _fitting(runs, width, height)
  if high >= _LEAST_HEIGHT or len(ended) in (0, len(runs)):
    return _grid(runs, width, max(high, _LEAST_HEIGHT), most)
  live = [run for run in runs if not run.ended]
  left = None if height is None else height - len(ended)
  high, most = _fitting(live, width, left)
  said = [
    Text(f"{run.name}: {run.what}, {run.state}", no_wrap=True) for run in ended
  ]
  return Group(_grid(live, width, max(high, _LEAST_HEIGHT), most), *said)


def _abreast(runs: Sequence[Run], width: int) -> int:
  return max(min(len(runs), width // _LEAST_WIDTH), 1)


def _fitting(
  runs: Sequence[Run], width: int, height: int | None
) -> tuple[int, int]:
  """(plot height with which all plots fit, number of plots at the minimum)."""
  most = max((len(run.panels) for run in runs), default=0)
  if height is None or not most:
    return _HEIGHT, most
  room = height // -(-len(runs) // _abreast(runs, width)) - _AROUND
  # A plot also has a title and a legend.
  return min(room // most - 2, _HEIGHT), max(room // (_LEAST_HEIGHT + 2), 1)


def _grid(
  runs: Sequence[Run], width: int, high: int, most: int
) -> RenderableType:
  """Columns of runs with up to this many plots of this height."""
  abreast = _abreast(runs, width)
  each = width // abreast
  lines: dict[str, list[Line]] = {}
  for run in runs:
    for title, those in run.panels.items():
      lines[title] = lines.get(title, []) + those
  ranges = {title: limits(all_) for title, all_ in lines.items() if all_}
  grid = Table.grid()
  for start in range(0, len(runs), abreast):
    grid.add_row(
      *(
        _column(run, each, ranges, high, most)
        for run in runs[start : start + abreast]
      )
    )
  return grid


def _column(
  run: Run, width: int, ranges: dict[str, Limits], high: int, most: int
) -> RenderableType:
  """One run: its state and progress, its plots and its throughput."""
  inside = width - 4
  parts: list[RenderableType] = [
    Text(f"{run.what}: {run.state}", no_wrap=True, overflow="ellipsis"),
    _progress(run, inside),
  ]
  for title, lines in list(run.panels.items())[:most]:
    parts.append(Text(title, style="bold"))
    if lines:
      parts.append(plot(lines, inside, high, ranges[title]))
    else:
      parts.append(Text("nothing yet" + "\n" * high, style="dim"))
  parts.append(_rates(run))
  return Panel(Group(*parts), title=Text(run.name), width=width)


def _progress(run: Run, width: int) -> RenderableType:
  counts = f" {run.step:,} of {run.num_steps:,} steps"
  row = Table.grid()
  bar = ProgressBar(run.num_steps, run.step, width=max(width - len(counts), 4))
  row.add_row(bar, Text(counts))
  return row


def _rates(run: Run) -> Text:
  shown = [
    words.format(run.rates[name])
    for name, words in _RATES.items()
    if name in run.rates
  ]
  return Text("; ".join(shown), style="dim")
