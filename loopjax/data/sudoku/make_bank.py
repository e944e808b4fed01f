"""Makes the puzzles shipped with the package, in a few minutes:

python -m loopjax.data.sudoku.make_bank --out=bank.npz --seed=0
"""

import argparse
import pathlib

import numpy as np

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import generator, puzzles, solver

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
  answers = generator.random_solutions(board, num_minimal, rng)
  no_clues = np.zeros(num_minimal, np.int64)
  minimal = generator.dig(board, answers, no_clues, rng)
  easier, more_answers, _ = generator.generate(
    board, num_made - num_minimal, rng
  )
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
