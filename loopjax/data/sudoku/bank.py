"""The puzzles shipped with the package: `bank.npz`, and its format.

Each size of board has three arrays, named after its boxes (`3x3_givens`): the
`givens`, `answers` and (as uint16) `ratings` of `puzzles.Puzzles`.
"""

import pathlib
from typing import Any

import numpy as np

from loopjax import errors
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import symmetry
from loopjax.data.sudoku.puzzles import Puzzles, unpack

PATH = pathlib.Path(__file__).with_name("bank.npz")


def load_bank(board: board_lib.Board, path: pathlib.Path = PATH) -> Puzzles:
  """Loads all puzzles of one size from the bank.

  Args:
    board: the geometry.
    path: file written by `save_bank`.

  Returns:
    The puzzles, in random order; ratings are numbers of wrong guesses, as
    `solver.solve` counts them.

  Raises:
    errors.UserError: if the bank has no puzzles of this size, or is missing.
  """
  name = _name(board)
  try:
    with np.load(path) as arrays:
      sizes = sorted({key.split("_")[0] for key in arrays})
      if name not in sizes:
        raise errors.UserError(
          f"{path}: no puzzles with {name} boxes; expected one of {sizes}"
        )
      givens, answers, ratings = (
        arrays[f"{name}_{part}"] for part in ("givens", "answers", "ratings")
      )
  except FileNotFoundError:
    raise errors.UserError(
      f"{path}: the puzzle bank is missing; install the package again or run "
      f"python -m loopjax.data.sudoku.make_bank --out={path}"
    ) from None
  return Puzzles(
    givens=givens,
    answers=answers,
    class_keys=symmetry.class_key(board, unpack(board, givens, answers)[1]),
    ratings=ratings.astype(np.int32),
    source_ids=np.zeros(len(answers), np.int32),
    sources=("bank",),
  )


def save_bank(
  path: pathlib.Path,
  content: dict[board_lib.Board, Puzzles],
):
  """Writes puzzles of several sizes in the layout that `load_bank` reads.

  Args:
    path: output path.
    content: the puzzles of each size, in the order in which to store them.
      Ratings above 65535 are stored as 65535.
  """
  arrays: dict[str, Any] = {}
  for board, puzzles in content.items():
    name = _name(board)
    arrays[f"{name}_givens"] = puzzles.givens
    arrays[f"{name}_answers"] = puzzles.answers
    arrays[f"{name}_ratings"] = np.minimum(puzzles.ratings, 65535).astype(
      np.uint16
    )
  np.savez_compressed(path, **arrays)


def _name(board):
  return f"{board.box_rows}x{board.box_cols}"
