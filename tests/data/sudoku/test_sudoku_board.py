"""Geometry, clashes and solutions."""

import numpy as np
import pytest

from loopjax import errors
from loopjax.data.sudoku import board as board_lib

ALL_BOARDS = [
  board_lib.Board(2, 2),
  board_lib.Board(2, 3),
  board_lib.Board(3, 2),
  board_lib.Board(3, 3),
]


def pattern(board):
  """A solution: each row is the previous one shifted by a box width."""
  line = np.arange(board.size)
  offset = line % board.box_rows * board.box_cols + line // board.box_rows
  return ((offset[:, None] + line) % board.size + 1).reshape(-1)


@pytest.mark.parametrize("board", ALL_BOARDS, ids=str)
def test_units_are_rows_columns_and_boxes(board):
  assert board.units.shape == (3 * board.size, board.size)
  for ids, units in zip(
    (board.row, board.column, board.box),
    np.split(board.units, 3),
    strict=True,
  ):
    for unit, members in enumerate(units):
      assert (ids[members] == unit).all()


def test_boxes_of_a_board_that_is_not_square_boxed():
  board = board_lib.Board(2, 3)
  box = board.box.reshape(6, 6)
  assert (box[:2, :3] == 0).all() and (box[:2, 3:] == 1).all()
  assert (box[2:4, :3] == 2).all() and (box[4:, 3:] == 5).all()


@pytest.mark.parametrize("boxes", [(1, 4), (4, 4), (0, 3), (-3, -3)])
def test_impossible_boxes(boxes):
  with pytest.raises(errors.UserError, match="unsupported"):
    board_lib.Board(*boxes)


@pytest.mark.parametrize("board", ALL_BOARDS, ids=str)
def test_is_solution(board):
  grid = pattern(board)
  assert board_lib.is_solution(board, grid[None]).tolist() == [True]
  broken = np.tile(grid, (4, 1))
  broken[0, 0] = 0
  broken[1, [0, 1]] = broken[1, [1, 0]]  # Valid row and box, invalid columns.
  broken[2, -1] = board.size + 1
  assert board_lib.is_solution(board, broken).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("board", ALL_BOARDS, ids=str)
def test_clashes_in_every_unit_and_in_no_other_way(board):
  peers = np.zeros((board.num_cells, board.num_cells), bool)
  for unit in board.units:
    peers[unit[:, None], unit] = True
  for first in range(board.num_cells):
    puzzles = np.zeros((board.num_cells, board.num_cells), np.int8)
    puzzles[:, first] = board.size
    np.fill_diagonal(puzzles, board.size)
    expected = peers[first].copy()
    expected[first] = False
    assert (board_lib.clashes(board, puzzles) == expected).all()


def test_blanks_do_not_clash():
  board = board_lib.Board(3, 3)
  assert not board_lib.clashes(board, np.zeros((2, 81), np.uint8)).any()
