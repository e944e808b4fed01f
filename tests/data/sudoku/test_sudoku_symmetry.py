"""Symmetries, class keys and the split."""

import itertools

import numpy as np
import pytest

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import generator, solver, symmetry, task

BOARDS = [
  board_lib.Board(2, 2),
  board_lib.Board(2, 3),
  board_lib.Board(3, 2),
  board_lib.Board(3, 3),
]
each_board = pytest.mark.parametrize("board", BOARDS, ids=str)


def random_symmetries(board, num, seed):
  rng = np.random.default_rng(seed)
  uniforms = rng.random((num, symmetry.num_uniforms(board)))
  return symmetry.from_uniforms(board, uniforms)


def all_small_grids():
  """All 288 solutions of the 4x4 board, from all 4-tuples of rows."""
  board = board_lib.Board(2, 2)
  rows = list(itertools.permutations((1, 2, 3, 4)))
  grids = np.array(list(itertools.product(rows, repeat=4))).reshape(-1, 16)
  return grids[board_lib.is_solution(board, grids)]


@each_board
def test_solutions_stay_solutions(board):
  grids = generator.random_solutions(board, 300, np.random.default_rng(0))
  moved = symmetry.apply(random_symmetries(board, 300, 1), grids)
  assert moved.dtype == np.uint8
  assert board_lib.is_solution(board, moved).all()
  assert (moved != grids).any(axis=1).mean() > 0.9


@each_board
def test_puzzles_keep_blanks_answers_and_uniqueness(board):
  rng = np.random.default_rng(0)
  questions, answers = generator.generate(board, 100, rng)
  change = random_symmetries(board, 100, 1)
  assert (change.relabelling[:, 0] == 0).all()
  question = symmetry.apply(change, questions)
  answer = symmetry.apply(change, answers)
  blank = question == 0
  assert (blank.sum(axis=1) == (questions == 0).sum(axis=1)).all()
  assert (question[~blank] == answer[~blank]).all()
  result = solver.solve(board, question)
  assert (result.num_solutions == 1).all()
  assert (result.solutions == answer).all()


@each_board
def test_symmetries_are_permutations(board):
  cells, names = random_symmetries(board, 200, 3)
  assert (np.sort(cells, axis=1) == np.arange(board.num_cells)).all()
  assert (np.sort(names, axis=1) == np.arange(board.size + 1)).all()


def test_all_symmetries_of_the_cells_occur():
  # 2 orders of bands, of stacks, of rows in 2 bands, of columns in 2 stacks,
  # and the transposition; on 2x3 boxes 3 bands, no transposition.
  for boxes, expected in (((2, 2), 2**7), ((2, 3), 6 * 2**3 * 2 * 6**2)):
    board = board_lib.Board(*boxes)
    cells = random_symmetries(board, 60000, 0).cell_permutation
    assert len(np.unique(cells, axis=0)) == expected


def test_all_relabellings_are_equally_likely():
  names = random_symmetries(board_lib.Board(2, 2), 24000, 0).relabelling
  _, counts = np.unique(names, axis=0, return_counts=True)
  assert len(counts) == 24
  assert np.abs(counts - 1000).max() < 200


def test_largest_uniforms_are_in_range():
  board = board_lib.Board(3, 3)
  largest = np.nextafter(np.float32(1), np.float32(0))
  uniforms = np.full((1, symmetry.num_uniforms(board)), largest)
  cells = symmetry.from_uniforms(board, uniforms).cell_permutation
  assert (np.sort(cells[0]) == np.arange(81)).all()


def test_rows_of_a_batch_are_independent():
  """The order of the data does not depend on its partition."""
  board = board_lib.Board(2, 3)
  rng = np.random.default_rng(0)
  uniforms = rng.random((20, symmetry.num_uniforms(board)))
  whole = symmetry.from_uniforms(board, uniforms)
  part = symmetry.from_uniforms(board, uniforms[7:9])
  for all_rows, some_rows in zip(whole, part, strict=True):
    assert (all_rows[7:9] == some_rows).all()


@each_board
def test_class_key_is_invariant(board):
  grids = generator.random_solutions(board, 500, np.random.default_rng(0))
  keys = symmetry.class_key(board, grids)
  for seed in range(3):
    moved = symmetry.apply(random_symmetries(board, 500, seed), grids)
    assert (symmetry.class_key(board, moved) == keys).all()
  assert len(np.unique(keys)) > 1


@pytest.mark.parametrize(
  ("board", "grid", "key"),
  [
    (BOARDS[0], "1234342121434312", 0x1BAD0F2B5BBFB9EA),
    (BOARDS[1], "216354543162421635635241352416164523", 0x752C74189E97271E),
    (
      BOARDS[3],
      "8134792655921687437642531983276145891469853279587324162713968546358419"
      "72489527631",
      0x713195188401A607,
    ),
  ],
)
def test_the_keys_stay(board, grid, key):
  """A different number means different splits: results are not comparable."""
  grids = np.array([[int(digit) for digit in grid]])
  assert symmetry.class_key(board, grids).tolist() == [key]


def test_class_key_separates_the_two_small_classes():
  board = board_lib.Board(2, 2)
  grids = all_small_grids()
  assert len(grids) == 288
  keys, counts = np.unique(symmetry.class_key(board, grids), return_counts=True)
  assert len(keys) == 2 and sorted(counts) == [96, 192]
  # The test split is exactly the smaller class.
  assert ((symmetry.place(keys) < task.TEST_SHARE) == (counts == 96)).all()


def test_class_key_separates_nearly_all_classes_of_6x6():
  board = board_lib.Board(2, 3)
  grids = generator.random_solutions(board, 20000, np.random.default_rng(0))
  num_keys = len(np.unique(symmetry.class_key(board, grids)))
  assert 45 <= num_keys <= 49  # There are 49 classes.


def test_class_key_separates_random_9x9_grids():
  board = board_lib.Board(3, 3)
  grids = generator.random_solutions(board, 1000, np.random.default_rng(0))
  assert len(np.unique(symmetry.class_key(board, grids))) == 1000


@pytest.mark.parametrize("boxes", [(2, 3), (3, 3)])
def test_about_a_fifth_of_the_grids_is_for_the_test(boxes):
  board = board_lib.Board(*boxes)
  grids = generator.random_solutions(board, 3000, np.random.default_rng(2))
  keys = symmetry.class_key(board, grids)
  assert 0.16 < (symmetry.place(keys) < task.TEST_SHARE).mean() < 0.24
