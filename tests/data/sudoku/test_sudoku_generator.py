"""Making puzzles: random solutions, digging, and the bank."""

import numpy as np
import pytest

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import generator, solver

BOARDS = [
  board_lib.Board(2, 2),
  board_lib.Board(2, 3),
  board_lib.Board(3, 3),
]
each_board = pytest.mark.parametrize("board", BOARDS, ids=str)


@each_board
def test_random_solutions_are_spread(board):
  grids = generator.random_solutions(board, 2000, np.random.default_rng(0))
  assert grids.shape == (2000, board.num_cells) and grids.dtype == np.uint8
  assert board_lib.is_solution(board, grids).all()
  # Every digit is about equally frequent in every cell.
  for digit in range(1, board.size + 1):
    share = (grids == digit).mean(axis=0) * board.size
    assert share.min() > 0.6 and share.max() < 1.4
  # There are 288 4x4 grids and 28 million 6x6 grids.
  num_distinct = len(np.unique(grids, axis=0))
  assert num_distinct > {4: 280, 6: 1990, 9: 1999}[board.size]


def test_random_solutions_of_none_and_of_several_batches(monkeypatch):
  board = board_lib.Board(2, 2)
  rng = np.random.default_rng(0)
  assert generator.random_solutions(board, 0, rng).shape == (0, 16)
  monkeypatch.setattr(generator, "_BATCH", 7)
  grids = generator.random_solutions(board, 30, rng)
  assert grids.shape == (30, 16)
  assert board_lib.is_solution(board, grids).all()


@each_board
def test_puzzles_have_exactly_their_answer(board):
  rng = np.random.default_rng(0)
  questions, answers = generator.generate(board, 300, rng)
  assert questions.dtype == answers.dtype == np.uint8
  result = solver.solve(board, questions)
  assert (result.num_solutions == 1).all()
  assert (result.solutions == answers).all()
  clues = (questions != 0).sum(axis=1)
  assert clues.max() <= 2 * board.num_cells // 3
  assert len(np.unique(clues)) > board.size // 2


def test_deterministic_by_seed():
  board = board_lib.Board(2, 3)
  first, again, other = (
    generator.generate(board, 50, np.random.default_rng(seed))
    for seed in (5, 5, 6)
  )
  for left, right in zip(first, again, strict=True):
    assert (left == right).all()
  assert (first[0] != other[0]).any()


def test_dug_to_the_end_no_clue_can_be_spared():
  board = board_lib.Board(2, 3)
  rng = np.random.default_rng(0)
  answers = generator.random_solutions(board, 20, rng)
  questions = generator.dig(board, answers, np.zeros(20), rng)
  for question in questions:
    given = np.flatnonzero(question)
    without = np.tile(question, (len(given), 1))
    without[np.arange(len(given)), given] = 0
    assert (solver.solve(board, without).num_solutions == 2).all()
