"""Random Sudoku solutions, and puzzles dug out of them.

As a command, makes the puzzles shipped with the package, in a few minutes:

python -m loopjax.data.sudoku.generator --out=bank.npz --seed=0
"""

import argparse
import pathlib

import numpy as np

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import puzzles, solver

# Solutions grown at a time, to bound memory.
_BATCH = 8192


def random_solutions(
  board: board_lib.Board, num: int, rng: np.random.Generator
) -> np.ndarray:
  """Draws solutions at random, nearly but not exactly uniformly.

  Each one grows from the empty board: a random candidate is placed in a random
  cell among those with the fewest candidates, then singles are filled in, and
  so on. A board that runs into a contradiction starts over.

  Args:
    num: number of solutions.
    rng: source of all randomness.

  Returns:
    uint8 `[num, cells]`; repetitions are possible.
  """
  solutions, missing = [np.empty((0, board.num_cells), np.uint8)], num
  while missing:
    grids = _grow(board, min(missing, _BATCH), rng)
    solutions.append(grids)
    missing -= len(grids)
  return np.concatenate(solutions)


def generate(
  board: board_lib.Board, num: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Makes puzzles that have exactly one solution.

  Clues are removed from random solutions, in random order, as long as the
  solution remains unique, down to a target drawn for each puzzle: uniform
  between a fifth, which is out of reach for almost every solution, and two
  thirds of the cells. An unreachable target gives a minimal puzzle, in which no
  clue can be removed.

  Args:
    num: number of puzzles.
    rng: source of all randomness.

  Returns:
    Questions and answers, uint8 `[num, cells]` each.
  """
  min_clues, max_clues = board.num_cells // 5, 2 * board.num_cells // 3
  targets = rng.integers(min_clues, max_clues, num, endpoint=True)
  answers = random_solutions(board, num, rng)
  return dig(board, answers, targets, rng), answers


def dig(
  board: board_lib.Board,
  answers: np.ndarray,
  targets: np.ndarray,
  rng: np.random.Generator,
) -> np.ndarray:
  """Removes clues at random while the solution remains unique.

  Args:
    answers: solutions, `[N, cells]`.
    targets: stop at this many clues, `[N]`.
    rng: source of all randomness.

  Returns:
    Questions, uint8 `[N, cells]`. Questions with more clues than their target
    are minimal: removing any clue would allow several solutions.
  """
  cells = np.tile(np.arange(board.num_cells), (len(answers), 1))
  order = rng.permuted(cells, axis=1)
  questions = np.array(answers, np.uint8)
  clues = np.full(len(questions), board.num_cells)
  # Round t tries the clue `order[n, t]` of every puzzle n at once.
  for cell in order.T:
    rows = np.flatnonzero(clues > targets)
    removed = cell[rows]
    digit = questions[rows, removed]
    attempt = questions[rows]
    attempt[np.arange(rows.size), removed] = 0
    candidates = solver.candidates_of(board, attempt)
    # Other solutions, if any, have another digit in this cell. Excluding its
    # own digit refutes most boards quickly.
    bit = np.uint16(1) << (digit - 1).astype(np.uint16)
    candidates[removed, np.arange(rows.size)] ^= bit
    other_solutions = solver.solve_candidates(
      board, candidates, max_solutions=1
    )
    removable = other_solutions.num_solutions == 0
    questions[rows[removable], removed[removable]] = 0
    clues[rows[removable]] -= 1
  return questions


def _grow(board, num, rng):
  """Grows `num` boards and returns the solutions among them, `[M, cells]`."""
  full = np.uint16(2**board.size - 1)
  candidates = np.full((board.num_cells, num), full)
  finished = []
  while candidates.shape[1]:
    tight, dead, solved = solver.tighten(board, candidates)
    finished.append(solver.digits_of(candidates.compress(solved, axis=1)))
    stuck = (tight == candidates).all(axis=0) & ~dead & ~solved
    _place(tight, np.flatnonzero(stuck), rng)
    candidates = tight.compress(~dead & ~solved, axis=1)
  return np.concatenate(finished)


def _place(candidates, boards, rng):
  """Places a random digit on each of the given boards, in place."""
  cells = candidates[:, boards]
  count = np.bitwise_count(cells).astype(np.float32)
  count[count == 1] = np.inf
  # Noise below 1 chooses among the cells with the fewest candidates.
  target = (count + rng.random(count.shape, np.float32)).argmin(axis=0)
  masks = cells[target, np.arange(boards.size)]
  bits = np.uint16(1) << np.arange(16, dtype=np.uint16)[:, None]
  noise = rng.random((16, boards.size), np.float32)
  digit = np.where(masks & bits, noise, -1).argmax(axis=0)
  candidates[target, boards] = bits[digit, 0]


# Per size: number of puzzles made, share of minimal ones (the others stop at
# random numbers of clues), and number kept.
_PLAN = {
  board_lib.Board(2, 2): (6000, 0.7, 2000),
  board_lib.Board(2, 3): (50000, 0.3, 20000),
  board_lib.Board(3, 3): (64000, 0.7, 24000),
}

# Keeps equal numbers of puzzles with ratings 0, 1 to 2, 3 to 9, and 10 or more,
# if there are enough.
_RATING_EDGES = (1, 3, 10)


def make_puzzles(
  board: board_lib.Board,
  num_made: int,
  minimal_share: float,
  num_kept: int,
  rng: np.random.Generator,
) -> puzzles.Puzzles:
  """Makes distinct puzzles of all difficulties, in random order.

  Args:
    num_made: how many puzzles to choose from.
    minimal_share: share of minimal puzzles among them.
    num_kept: maximum number to return.
    rng: source of all randomness.

  Returns:
    Puzzles, rated by `solver.solve`.
  """
  num_minimal = round(num_made * minimal_share)
  # A puzzle without clues has several solutions: 0 is unreachable.
  answers = random_solutions(board, num_minimal, rng)
  no_clues = np.zeros(num_minimal, np.int64)
  minimal = dig(board, answers, no_clues, rng)
  easier, more_answers = generate(board, num_made - num_minimal, rng)
  questions = np.concatenate([minimal, easier])
  answers = np.concatenate([answers, more_answers])
  _, distinct = np.unique(questions, axis=0, return_index=True)
  questions, answers = questions[distinct], answers[distinct]
  ratings = solver.solve(board, questions).guesses
  kept = _spread(np.digitize(ratings, _RATING_EDGES), num_kept, rng)
  return puzzles.Puzzles(
    *puzzles.pack(board, questions[kept], answers[kept]),
    ratings=ratings[kept],
    source_ids=np.zeros(len(kept), np.int32),
    sources=("bank",),
  )


def _spread(strata, num, rng):
  """Draws `num` positions without replacement, evenly over the strata."""
  order = rng.permutation(len(strata))
  # Each item's rank within its stratum, in random order: taking the lowest
  # ranks first alternates between strata.
  place = np.empty(len(strata), np.int64)
  for stratum in np.unique(strata):
    members = order[strata[order] == stratum]
    place[members] = np.arange(len(members))
  first = order[np.argsort(place[order], kind="stable")][:num]
  return rng.permutation(first)


def main() -> None:
  """Makes, reports and writes the puzzles of every size."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  content = {}
  for board, plan in _PLAN.items():
    # Sizes are independent of each other.
    key = (arguments.seed, board.box_rows, board.box_cols)
    rng = np.random.default_rng(key)
    content[board] = make_puzzles(board, *plan, rng)
    counts = np.bincount(np.digitize(content[board].ratings, _RATING_EDGES))
    print(f"{board}: puzzles by difficulty {counts.tolist()}", flush=True)
  puzzles.save_bank(arguments.out, content)


if __name__ == "__main__":
  main()
