"""The packaged puzzles."""

import numpy as np
import pytest

from loopjax import errors
from loopjax.data.sudoku import (
  bank,
  generator,
  make_bank,
  solver,
  symmetry,
  task,
)
from loopjax.data.sudoku import board as board_lib

NUM_PUZZLES = {
  board_lib.Board(2, 2): 2000,
  board_lib.Board(2, 3): 20000,
  board_lib.Board(3, 3): 24000,
}


def boards(board, puzzles):
  return bank.unpack(board, puzzles.givens, puzzles.answers)


each_board = pytest.mark.parametrize("board", NUM_PUZZLES, ids=str)


def test_file_is_small():
  assert bank.PATH.stat().st_size <= 2_000_000


@each_board
def test_all_puzzles_are_sound_and_distinct(board):
  puzzles = bank.load_bank(board)
  num = NUM_PUZZLES[board]
  questions, answers = boards(board, puzzles)
  for cells in (questions, answers):
    assert cells.shape == (num, board.num_cells) and cells.dtype == np.uint8
  assert puzzles.ratings.shape == puzzles.source_ids.shape == (num,)
  assert puzzles.ratings.dtype == puzzles.source_ids.dtype == np.int32
  assert puzzles.sources == ("bank",) and not puzzles.source_ids.any()
  assert board_lib.is_solution(board, answers).all()
  given = questions != 0
  assert (questions == answers * given).all()
  assert len(np.unique(questions, axis=0)) == num


@each_board
def test_a_sample_has_one_solution_and_the_stored_rating(board):
  puzzles = bank.load_bank(board)
  some = np.random.default_rng(0).choice(NUM_PUZZLES[board], 200, False)
  puzzles = bank.take(puzzles, some)
  questions, answers = boards(board, puzzles)
  result = solver.solve(board, questions)
  assert (result.num_solutions == 1).all()
  assert (result.solutions == answers).all()
  assert (result.guesses == puzzles.ratings).all()


@each_board
def test_splits_are_large_enough_and_disjoint_up_to_symmetry(board):
  puzzles = bank.load_bank(board)
  test = symmetry.place(puzzles.class_keys) < task.TEST_SHARE
  assert test.sum() >= (2500 if board.size > 4 else 300)
  assert (~test).sum() >= (12000 if board.size > 4 else 1000)
  keys = symmetry.class_key(board, boards(board, puzzles)[1])
  assert (keys == puzzles.class_keys).all()
  assert not np.isin(keys[test], keys[~test]).any()


def test_9x9_puzzles_are_of_all_difficulties():
  ratings = bank.load_bank(board_lib.Board(3, 3)).ratings
  for low, high, least in ((0, 0, 4000), (1, 2, 4000), (3, 9, 4000)):
    assert ((ratings >= low) & (ratings <= high)).sum() >= least
  assert (ratings >= 10).sum() >= 1000


def test_made_saved_and_loaded(tmp_path):
  """The script's parts, for a size that is not in the bank."""
  board = board_lib.Board(3, 2)
  rng = np.random.default_rng(0)
  made = make_bank.make_puzzles(board, 60, 0.5, 40, rng)
  assert len(made.ratings) == 40
  again = make_bank.make_puzzles(board, 60, 0.5, 40, np.random.default_rng(0))
  assert (made.givens == again.givens).all()
  path = tmp_path / "bank.npz"
  bank.save_bank(path, {board: made})
  loaded = bank.load_bank(board, path)
  for loaded_cells, cells in zip(
    boards(board, loaded), boards(board, made), strict=True
  ):
    assert (loaded_cells == cells).all()
  assert (loaded.ratings == made.ratings).all()


def test_odd_number_of_cells_survives_packing():
  board = board_lib.Board(3, 3)
  questions, answers, _ = generator.generate(
    board, 20, np.random.default_rng(0)
  )
  givens, packed, _ = bank.pack(board, questions, answers)
  assert (givens.shape, packed.shape) == ((20, 11), (20, 41))
  got = bank.unpack(board, givens, packed)
  assert (got[0] == questions).all() and (got[1] == answers).all()


def test_the_largest_ratings_are_cut(tmp_path):
  board = board_lib.Board(2, 2)
  puzzles = bank.load_bank(board)._replace(ratings=np.array([70000] * 2000))
  bank.save_bank(tmp_path / "bank.npz", {board: puzzles})
  assert (bank.load_bank(board, tmp_path / "bank.npz").ratings == 65535).all()


def test_missing_size_and_missing_file(tmp_path):
  with pytest.raises(errors.UserError, match="no puzzles with 2x4 boxes"):
    bank.load_bank(board_lib.Board(2, 4))
  with pytest.raises(errors.UserError, match="make_bank"):
    bank.load_bank(board_lib.Board(3, 3), tmp_path / "none.npz")
