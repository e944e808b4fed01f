"""One frame with several runs, side by side if the terminal is wide enough."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loopjax.watch import plots
from loopjax.watch.runs import Line, Run

_LEAST_WIDTH = 44  # Minimum width of a column, in characters.
_HEIGHT, _LEAST_HEIGHT = 7, 2  # Height of a plot, in lines.
_AROUND = 6  # Lines of a column beside its plots, at most.
# Metrics of a training row that the last line shows, and their formats.
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
    height: its height in lines, into which the frame is to fit: plots get
      lower; then runs that have ended have a line each, below the others, and
      columns have fewer plots. None for any height.
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
  """The height of plots with which all fit, and how many do with the least."""
  most = max((len(run.panels) for run in runs), default=0)
  if height is None or not most:
    return _HEIGHT, most
  room = height // -(-len(runs) // _abreast(runs, width)) - _AROUND
  # A plot has a title and a legend, too.
  return min(room // most - 2, _HEIGHT), max(room // (_LEAST_HEIGHT + 2), 1)


def _grid(
  runs: Sequence[Run], width: int, high: int, most: int
) -> RenderableType:
  """Columns of runs with plots of this height, and at most so many."""
  abreast = _abreast(runs, width)
  each = width // abreast
  lines: dict[str, list[Line]] = {}
  for run in runs:
    for title, those in run.panels.items():
      lines[title] = lines.get(title, []) + those
  ranges = {title: plots.limits(all_) for title, all_ in lines.items() if all_}
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
  run: Run, width: int, ranges: dict[str, plots.Limits], high: int, most: int
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
      parts.append(plots.plot(lines, inside, high, ranges[title]))
    else:
      parts.append(Text("nothing yet" + "\n" * high, style="dim"))
  parts.append(_rates(run))
  return Panel(Group(*parts), title=run.name, width=width)


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
