"""Geometry of Sudoku boards, and checks that only need it.

Everywhere in this package a board is an integer array `[..., cells]`, in
row-major order, where 0 is a blank and 1 to `size` are the digits.
"""

import dataclasses
import functools

import numpy as np

from loopjax import errors


@dataclasses.dataclass(frozen=True)
class Board:
  """A square board tiled by boxes of `box_rows` x `box_cols` cells.

  A band is `box_rows` consecutive rows, a stack `box_cols` consecutive
  columns. There are `box_cols` bands and `box_rows` stacks, because a box
  holds as many cells as the board has rows.

  Attributes:
    box_rows: number of rows of a box.
    box_cols: number of columns of a box.

  Raises:
    errors.UserError: if the side is not within 4 to 9: digits are written as
      one character, and a board needs boxes of more than one row and column.
  """

  box_rows: int
  box_cols: int

  def __post_init__(self):
    if min(self.box_rows, self.box_cols) < 2 or self.size > 9:
      raise errors.UserError(
        f"boxes of {self.box_rows}x{self.box_cols} cells are unsupported; "
        "expected 2x2, 2x3, 3x2, 2x4, 4x2 or 3x3"
      )

  @property
  def size(self) -> int:
    """The side of the board, which is also the number of digits."""
    return self.box_rows * self.box_cols

  @property
  def num_cells(self) -> int:
    """The number of cells."""
    return self.size**2

  @functools.cached_property
  def row(self) -> np.ndarray:
    """The row of every cell, int64 `[cells]`."""
    return np.arange(self.num_cells) // self.size

  @functools.cached_property
  def column(self) -> np.ndarray:
    """The column of every cell, int64 `[cells]`."""
    return np.arange(self.num_cells) % self.size

  @functools.cached_property
  def box(self) -> np.ndarray:
    """The box of every cell, numbered in row-major order, int64 `[cells]`."""
    band, stack = self.row // self.box_rows, self.column // self.box_cols
    return band * self.box_rows + stack

  @functools.cached_property
  def units(self) -> np.ndarray:
    """The cells of all rows, then columns, then boxes, `[3 * size, size]`."""
    ids = (self.row, self.column, self.box)
    # A stable sort by unit lists the cells of unit 0, then of unit 1, ...
    members = [np.argsort(unit, kind="stable") for unit in ids]
    return np.concatenate(members).reshape(-1, self.size)


def digit_bits(board: Board) -> np.ndarray:
  """Bit `d - 1` for digit d, and 0 for any other value, uint16 `[256]`."""
  bits = np.zeros(256, np.uint16)
  bits[1 : board.size + 1] = 1 << np.arange(board.size)
  return bits


def clashes(board: Board, puzzles: np.ndarray) -> np.ndarray:
  """Which boards contain a digit twice in a unit; blanks are ignored.

  Args:
    puzzles: `[N, cells]`.

  Returns:
    bool `[N]`.
  """
  total, union = _unit_digits(board, puzzles)
  # The sum of powers of two equals their union only if all of them differ.
  return (total != union).any(axis=1)


def is_solution(board: Board, grids: np.ndarray) -> np.ndarray:
  """Which boards contain every digit exactly once in every unit.

  Args:
    grids: `[N, cells]`; a board with a value outside 1 to `size` is not a
      solution.

  Returns:
    bool `[N]`.
  """
  _, union = _unit_digits(board, grids)
  # A unit has as many cells as there are digits: all present means each once.
  return (union == 2**board.size - 1).all(axis=1)


def _unit_digits(board, boards):
  """Sum and union of the digit bits of every unit, two `[N, 3 * size]`."""
  bits = digit_bits(board)[np.asarray(boards).astype(np.uint8)]
  bits = bits[:, board.units]
  # uint16 holds the largest sum, 9 cells of 2**8.
  total = np.add.reduce(bits, axis=2, dtype=np.uint16)
  return total, np.bitwise_or.reduce(bits, axis=2)
