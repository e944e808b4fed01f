"""Figures of Sudoku boards: how a puzzle is solved, and the slowest cells."""

import pathlib
from typing import NamedTuple

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import colors as colors_lib
from matplotlib import patches

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import halting
from loopjax.analysis.plots import draw
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import task as sudoku_task

_GIVEN, _RIGHT, _WRONG = "#d9d9d9", "#2a9d5c", "#d1495b"
_NUM_MOMENTS = 4


class BoardState(NamedTuple):
  """The state of the board after some loop.

  Attributes:
    title: title of the panel.
    digits: int [T], below 1 for none.
    confidence: probability of each digit, f32 [T].
  """

  title: str
  digits: np.ndarray
  confidence: np.ndarray


def draw_solved(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """puzzle.png: a hard solved puzzle (UTM, figure 8)."""
  return [_draw_puzzle(evaluated, choose(evaluated)[0], "puzzle.png")]


def draw_failed(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """puzzle_failed.png: a hard unsolved puzzle, if any (figure 9)."""
  row = choose(evaluated)[1]
  return (
    [] if row is None else [_draw_puzzle(evaluated, row, "puzzle_failed.png")]
  )


def draw_halting_map(
  evaluated: evaluated_lib.EvaluatedModel,
) -> list[pathlib.Path]:
  """halting_map.png: when cells halt, on average and in the solved puzzle."""
  steps = halting.ponder_steps(evaluated)
  if steps is None:
    return []
  return [_draw_halting_map(evaluated, choose(evaluated)[0], steps)]


def _board(evaluated: evaluated_lib.EvaluatedModel) -> board_lib.Board:
  task = evaluated.settings.task
  assert isinstance(task, sudoku_task.Config)
  return task.board


def choose(evaluated: evaluated_lib.EvaluatedModel) -> tuple[int, int | None]:
  """Chooses a hard puzzle that is solved, and a hard one that is not solved.

  Hard means: the highest rating group, then solved after the most loops, then
  the most blanks.

  Returns:
    (row of the solved puzzle or, if none is solved, of the one with the most
    correct cells; row of the unsolved puzzle or None).
  """
  answer = np.argmax(evaluated.output.logits, axis=-1)
  count = len(answer)
  targets = evaluated.batch["targets"][:count]
  blanks = np.sum(evaluated.batch["inputs"][:count] == 1, axis=1)
  rating = evaluated.batch["group/rating"][:count]
  right = np.sum(answer == targets, axis=1)
  solved = right == targets.shape[1]
  after = evaluated.output.trace["prediction"] == targets  # [K, B, T]
  loops_wrong = np.sum(~np.all(after, axis=2), axis=0)
  by_hardness = np.lexsort((blanks, loops_wrong, rating))[::-1]
  failing = by_hardness[~solved[by_hardness]]
  if solved.any():
    first = int(by_hardness[solved[by_hardness]][0])
  else:
    first = int(np.argmax(right))
    failing = failing[failing != first]
  return first, int(failing[0]) if len(failing) else None


def _draw_puzzle(
  evaluated: evaluated_lib.EvaluatedModel, row: int, name: str
) -> pathlib.Path:
  """One puzzle over the loops."""
  board = _board(evaluated)
  clues = evaluated.batch["inputs"][row] - 1
  answer = evaluated.batch["targets"][row] - 1
  states = _board_states(evaluated, row)
  columns = 3
  num_rows = -(-(len(states) + 1) // columns)
  side = 0.42 * board.size
  figure = draw.new(columns * side + 0.8, num_rows * (side + 0.7) + 0.9)
  grid = figure.subplots(num_rows, columns).ravel()
  for axes in grid[len(states) + 1 :]:
    axes.axis("off")
  colors = np.ones((board.num_cells, 4))
  colors[clues > 0] = colors_lib.to_rgba(_GIVEN)
  _draw_board(grid[0], board, clues, colors, clues > 0)
  givens = int(np.sum(clues > 0))
  grid[0].set_title(f"puzzle\n{givens} givens", fontsize=11)
  for axes, state in zip(grid[1:], states, strict=False):
    _draw_state(axes, board, clues, answer, state)
  handles = [
    patches.Patch(color=_GIVEN, label="given"),
    patches.Patch(color=_RIGHT, label="right"),
    patches.Patch(color=_WRONG, label="wrong, underlined"),
  ]
  figure.legend(
    handles=handles,
    loc="outside lower center",
    ncols=3,
    frameon=False,
    fontsize=9,
    title="stronger colour: more confident",
    title_fontsize=9,
  )
  return draw.save(figure, evaluated.directory / name)


def _board_states(
  evaluated: evaluated_lib.EvaluatedModel, row: int
) -> list[BoardState]:
  """A few loops spread over all that ran, then the output."""
  trace, logits = evaluated.output.trace, evaluated.output.logits[row]
  num_loops = len(trace["prediction"])
  loops = np.linspace(0, num_loops - 1, _NUM_MOMENTS).round().astype(int)
  states = [
    BoardState(
      f"after loop {loop + 1}",
      trace["prediction"][loop, row] - 1,
      trace["confidence"][loop, row],
    )
    for loop in np.unique(loops)
  ]
  probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
  probabilities /= probabilities.sum(axis=-1, keepdims=True)
  output = BoardState(
    "output", logits.argmax(axis=-1) - 1, probabilities.max(axis=-1)
  )
  return [*states, output]


def _draw_state(axes, board, givens, answer, state: BoardState) -> None:
  """Correct cells green, wrong ones red, stronger with higher confidence.

  Wrong digits are underlined: some readers cannot tell the colours apart.
  """
  right = state.digits == answer
  chance = 1 / board.size
  strength = np.clip((state.confidence - chance) / (1 - chance), 0, 1)
  colors = np.empty((board.num_cells, 4))
  for cell in range(board.num_cells):
    base = _RIGHT if right[cell] else _WRONG
    colors[cell] = (*colors_lib.to_rgb(base), 0.08 + 0.57 * strength[cell])
  colors[right & (givens > 0)] = colors_lib.to_rgba(_GIVEN)
  _draw_board(axes, board, state.digits, colors, givens > 0)
  wrong = np.flatnonzero(~right)
  left, bottom = (np.asarray(x)[wrong] for x in (board.column, board.row))
  axes.hlines(bottom + 0.85, left + 0.36, left + 0.64, "black", linewidth=1.2)
  blank = givens <= 0
  number = f"{int(right[blank].sum())} of {int(blank.sum())} blanks correct"
  result = "solved" if right.all() else number
  axes.set_title(f"{state.title}\n{result}", fontsize=11)


def _draw_halting_map(
  evaluated: evaluated_lib.EvaluatedModel, row: int, steps: np.ndarray
) -> pathlib.Path:
  """Mean steps of every cell, and the steps of one puzzle's cells."""
  board, num_memory = _board(evaluated), evaluated.num_memory
  cells = steps[:, num_memory:]
  blank = evaluated.batch["inputs"][: len(cells)] == 1
  side = max(0.55 * board.size, 3.0)
  figure = draw.new(2 * side + 2.2, side + 1.1)
  left, right = figure.subplots(1, 2)
  top = evaluated.settings.eval_loops
  mean = f"mean over {len(cells)} puzzles"
  _draw_steps(left, board, cells.mean(axis=0), mean, top)
  one = f"one puzzle with {int(blank[row].sum())} blanks"
  image = _draw_steps(right, board, cells[row], one, top)
  figure.colorbar(image, ax=[left, right], shrink=0.8, label="loops")
  givens = evaluated.batch["inputs"][row] - 1
  for cell in np.flatnonzero(givens > 0):
    corner = (board.column[cell] + 0.08, board.row[cell] + 0.08)
    right.add_patch(
      patches.Rectangle(
        corner, 0.84, 0.84, fill=False, linewidth=2, color=draw.RED
      )
    )
  figure.suptitle(
    f"Loops until a cell halts: givens {cells[~blank].mean():.2f}, blanks"
    f" {cells[blank].mean():.2f} (framed: givens)",
    fontsize=11,
  )
  return draw.save(figure, evaluated.directory / "halting_map.png")


def _draw_steps(axes, board, steps, title: str, top: int):
  """A heat map of steps, from none to all loops, with the numbers in it."""
  image = axes.imshow(
    steps.reshape(board.size, board.size),
    cmap="YlGnBu",
    vmin=0,
    vmax=top,
    extent=(0, board.size, board.size, 0),
  )
  decimals = 0 if np.array_equal(steps, np.rint(steps)) else 1
  for cell, value in enumerate(steps):
    color = "white" if value > 0.6 * top else "black"
    text = f"{value:.{decimals}f}"
    _write(axes, board, cell, text, color=color, fontsize=9)
  _draw_lines(axes, board)
  axes.set_title(title, fontsize=10)
  return image


def _draw_board(axes: axes_lib.Axes, board, digits, colors, bold) -> None:
  """Digits [T] on backgrounds [T, 4]; below 1 there is no digit."""
  size = board.size
  axes.imshow(colors.reshape(size, size, 4), extent=(0, size, size, 0))
  for cell in np.flatnonzero(digits > 0):
    weight = "bold" if bold[cell] else "normal"
    text = str(digits[cell])
    _write(axes, board, int(cell), text, fontsize=12, fontweight=weight)
  _draw_lines(axes, board)


def _write(axes: axes_lib.Axes, board, cell: int, text: str, **style) -> None:
  """Text in the middle of a cell."""
  where = (board.column[cell] + 0.5, board.row[cell] + 0.52)
  written = axes.text(*where, text, ha="center", va="center", **style)
  written.set_in_layout(False)  # Inside the axes; layout would take seconds.


def _draw_lines(axes: axes_lib.Axes, board: board_lib.Board) -> None:
  """Thin lines between cells, thick ones between boxes."""
  size = board.size
  at = np.arange(size + 1)
  thin = {"color": "0.6", "linewidth": 0.5}
  thick = {"color": "black", "linewidth": 1.6}
  axes.vlines(at, 0, size, **thin)
  axes.hlines(at, 0, size, **thin)
  axes.vlines(at[:: board.box_cols], 0, size, **thick)
  axes.hlines(at[:: board.box_rows], 0, size, **thick)
  axes.set_xlim(-0.05, size + 0.05)
  axes.set_ylim(size + 0.05, -0.05)
  axes.axis("off")
