"""The solver against plain backtracking, and its rating."""

import os
import pathlib

import numpy as np
import pytest

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import generator, solver
from loopjax.data.sudoku import puzzles as puzzles_lib

# A well-known hard puzzle.
HARD = (
  "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9...."
  "4.."
)
# Known for the long search that it takes to see that it has no solution.
IMPOSSIBLE = (
  ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4"
  "........."
)


def to_board(text):
  return np.array([list(text.replace(".", "0"))], np.uint8)


def brute_force(board, puzzle):
  """All solutions by plain backtracking, cell after cell."""
  grid = puzzle.tolist()
  peers = [
    {c for u in board.units.tolist() if cell in u for c in u} - {cell}
    for cell in range(board.num_cells)
  ]
  for cell, digit in enumerate(grid):
    if digit and digit in {grid[peer] for peer in peers[cell]}:
      return []
  solutions = []

  def fill(cell):
    while cell < len(grid) and grid[cell]:
      cell += 1
    if cell == len(grid):
      solutions.append(tuple(grid))
      return
    for digit in set(range(1, board.size + 1)) - {grid[p] for p in peers[cell]}:
      grid[cell] = digit
      fill(cell + 1)
    grid[cell] = 0

  fill(0)
  return solutions


def wrong_guesses(board, options, guessed=False):
  """The rating by its definition; `options` has a set of digits per cell."""
  units = board.units.tolist()
  digits = set(range(1, board.size + 1))
  before = None
  while options != before:
    before = [set(option) for option in options]
    for unit in units:
      for cell in unit:
        if len(options[cell]) == 1:
          for other in set(unit) - {cell}:
            options[other] -= options[cell]
      for digit in digits:
        places = [cell for cell in unit if digit in options[cell]]
        if not places:
          return int(guessed)
        if len(places) == 1:
          options[places[0]] &= {digit}
    if not all(options):
      return int(guessed)
  open_cells = [c for c, option in enumerate(options) if len(option) > 1]
  if not open_cells:
    return 0
  cell = min(open_cells, key=lambda c: len(options[c]))
  return sum(
    wrong_guesses(
      board,
      [{digit} if c == cell else set(o) for c, o in enumerate(options)],
      guessed=True,
    )
    for digit in options[cell]
  )


def random_puzzles(board, num, clues, seed):
  """Solutions with all but `clues` cells blank: often several solutions."""
  rng = np.random.default_rng(seed)
  puzzles = generator.random_solutions(board, num, rng)
  blank = rng.random(puzzles.shape).argsort(axis=1) >= clues
  return np.where(blank, 0, puzzles)


@pytest.mark.parametrize(
  ("boxes", "clues"), [((2, 2), 4), ((2, 2), 6), ((2, 3), 13), ((3, 2), 14)]
)
def test_agrees_with_brute_force(boxes, clues):
  board = board_lib.Board(*boxes)
  puzzles = random_puzzles(board, 60, clues, seed=1)
  # One wrong given makes some of them impossible.
  puzzles[::3, 5] = 1
  expected = [brute_force(board, puzzle) for puzzle in puzzles]
  counts = np.array([len(found) for found in expected])
  assert {0, 1} <= set(counts.tolist()) and counts.max() > 3
  for most in (1, 2, 1000000):
    result = solver.solve(board, puzzles, max_solutions=most)
    assert (result.num_solutions == np.minimum(counts, most)).all()
    for grid, solutions in zip(result.solutions, expected, strict=True):
      assert tuple(grid) in (solutions or [(0,) * board.num_cells])


def test_finds_all_288_grids_of_the_small_board():
  board = board_lib.Board(2, 2)
  empty = np.zeros((1, 16), np.uint8)
  assert solver.solve(board, empty, 1000).num_solutions.tolist() == [288]


@pytest.mark.parametrize("boxes", [(2, 2), (2, 3), (3, 3)])
def test_empty_boards_stop_at_two_solutions(boxes):
  board = board_lib.Board(*boxes)
  result = solver.solve(board, np.zeros((3, board.num_cells), np.uint8))
  assert result.num_solutions.tolist() == [2, 2, 2]
  assert board_lib.is_solution(board, result.solutions).all()


def test_impossible_boards_have_no_solution():
  board = board_lib.Board(3, 3)
  puzzles = np.zeros((4, 81), np.uint8)
  puzzles[0, [0, 1]] = 5  # Twice in a row.
  puzzles[1, :9] = [1, 2, 3, 4, 5, 6, 7, 8, 0]
  puzzles[1, 17] = 9  # The last cell of the row has no digit left.
  puzzles[2, 40] = 10  # Not a digit.
  puzzles[3] = 1
  result = solver.solve(board, puzzles)
  assert result.num_solutions.tolist() == [0, 0, 0, 0]
  assert not result.solutions.any()


def test_a_digit_without_a_place_is_a_contradiction_at_once():
  board = board_lib.Board(3, 3)
  for unit in board.units:
    candidates = solver.candidates_of(board, np.zeros((2, 81), np.uint8))
    candidates[unit, 1] &= ~np.uint16(4)  # Digit 3 is 1 << 2.
    _, dead, solved = solver.tighten(board, candidates)
    assert dead.tolist() == [False, True]
    assert solved.tolist() == [False, False]


def test_no_puzzles():
  board = board_lib.Board(3, 3)
  result = solver.solve(board, np.zeros((0, 81), np.uint8))
  assert result.solutions.shape == (0, 81)
  assert result.num_solutions.shape == result.guesses.shape == (0,)


def test_hard_puzzle_has_one_solution_and_needs_guesses():
  board = board_lib.Board(3, 3)
  result = solver.solve(board, to_board(HARD))
  assert result.num_solutions.tolist() == [1]
  assert board_lib.is_solution(board, result.solutions).all()
  given = to_board(HARD) != 0
  assert (result.solutions[given] == to_board(HARD)[given]).all()
  assert result.guesses[0] > 10


def test_a_search_ends_without_an_answer():
  """After so many nodes; what is found by then is an answer."""
  board = board_lib.Board(3, 3)
  contradiction = to_board("55" + "." * 79)
  boards = np.concatenate([to_board(IMPOSSIBLE), contradiction])
  result = solver.solve(board, boards, max_nodes=20_000)
  assert result.num_solutions.tolist() == [-1, 0]
  result = solver.solve(board, to_board(HARD), max_nodes=20_000)
  assert result.num_solutions.tolist() == [1]


def test_rating_is_zero_where_singles_are_enough():
  board = board_lib.Board(3, 3)
  rng = np.random.default_rng(0)
  answers = generator.random_solutions(board, 20, rng)
  answers[:, ::9] = 0
  result = solver.solve(board, answers)
  assert (result.num_solutions == 1).all()
  assert (result.guesses == 0).all()


@pytest.mark.parametrize(("boxes", "num"), [((2, 3), 150), ((3, 3), 15)])
def test_rating_counts_wrong_guesses(boxes, num):
  board = board_lib.Board(*boxes)
  rng = np.random.default_rng(3)
  answers = generator.random_solutions(board, num, rng)
  puzzles = generator.dig(board, answers, np.zeros(num), rng)
  digits = set(range(1, board.size + 1))
  expected = [
    wrong_guesses(board, [{d} if d else set(digits) for d in puzzle])
    for puzzle in puzzles.tolist()
  ]
  assert max(expected) > 1
  assert solver.solve(board, puzzles).guesses.tolist() == expected


def test_rating_depends_on_nothing_but_the_puzzle(monkeypatch):
  board = board_lib.Board(3, 3)
  rng = np.random.default_rng(0)
  answers = generator.random_solutions(board, 60, rng)
  puzzles = generator.dig(board, answers, np.zeros(60), rng)
  ratings = solver.solve(board, puzzles).guesses
  assert ratings.max() > 0 and ratings.min() == 0
  assert (solver.solve(board, puzzles[::-1]).guesses[::-1] == ratings).all()
  assert (solver.solve(board, puzzles, 1000).guesses == ratings).all()
  alone = [solver.solve(board, puzzle[None]).guesses[0] for puzzle in puzzles]
  assert (alone == ratings).all()
  monkeypatch.setattr(solver, "_WIDTH", 7)
  assert (solver.solve(board, puzzles).guesses == ratings).all()


@pytest.mark.usefixtures("user_cache")
def test_rating_of_real_puzzles_follows_theirs():
  """The published rating counts the guesses of another solver."""
  folder = os.environ.get("LOOPJAX_DATA")
  path = pathlib.Path(folder or "", "sudoku", "train.csv.gz")
  if not folder or not path.exists():
    pytest.skip("needs LOOPJAX_DATA with sudoku/train.csv.gz")
  board = board_lib.Board(3, 3)
  puzzles = puzzles_lib.read(board, path)
  some = slice(0, None, 100)
  questions, answers = puzzles_lib.unpack(
    board, puzzles.givens[some], puzzles.answers[some]
  )
  result = solver.solve(board, questions)
  assert (result.num_solutions == 1).all()
  assert (result.solutions == answers).all()
  ours, theirs = result.guesses, puzzles.ratings[some]
  assert np.corrcoef(np.log1p(ours), np.log1p(theirs))[0, 1] > 0.7
