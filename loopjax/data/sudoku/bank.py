"""The puzzles shipped with the package: `bank.npz`, and its format.

Each size of board has three arrays, named after its boxes (`3x3_givens`): the
`givens`, `answers` and (as uint16) `ratings` of `Puzzles`.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from loopjax import errors
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import symmetry
from loopjax.data.sudoku.board import Board


class Puzzles(NamedTuple):
  """N puzzles with their solutions, packed into a third of the bytes.

  A question equals its answer in the given cells and is blank elsewhere.
  Together they take 52 bytes for a 9x9 board, in memory and in files.

  Attributes:
    givens: uint8 `[N, ceil(cells / 8)]`, a bit for every cell, 1 where it is
      given; the last bits are 0.
    answers: uint8 `[N, ceil(cells / 2)]`, four bits for every cell of the
      solutions; the last half of a byte is 0.
    class_keys: uint64 `[N]`, `symmetry.class_key` of the solutions.
    ratings: int32 `[N]`, difficulty; larger is harder. The scale depends on
      the source.
    source_ids: int32 `[N]`, positions in `sources`.
    sources: the names of the puzzles' sources.
    num_skipped: number of malformed rows that were skipped.
    sha256: checksum of their file; "" for the packaged puzzles.
  """

  givens: np.ndarray
  answers: np.ndarray
  class_keys: np.ndarray
  ratings: np.ndarray
  source_ids: np.ndarray
  sources: tuple[str, ...]
  num_skipped: int = 0
  sha256: str = ""


def pack(
  board: Board, questions: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Givens, answers and class keys of uint8 boards `[N, cells]`."""
  padded = np.pad(answers, [(0, 0), (0, board.num_cells % 2)])
  return (
    np.packbits(questions != 0, axis=1),
    padded[:, 0::2] << 4 | padded[:, 1::2],
    symmetry.class_key(board, answers),
  )


def unpack(
  board: Board, givens: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Unpacked questions and answers, uint8 `[n, cells]` each."""
  halves = np.stack([answers >> 4, answers & 15], axis=2)
  cells = halves.reshape(len(answers), -1)[:, : board.num_cells]
  given = np.unpackbits(givens, axis=1, count=board.num_cells)
  return cells * given, np.ascontiguousarray(cells)


def take(puzzles: Puzzles, rows: np.ndarray) -> Puzzles:
  """Some of the puzzles, in this order."""
  return puzzles._replace(
    givens=puzzles.givens[rows],
    answers=puzzles.answers[rows],
    class_keys=puzzles.class_keys[rows],
    ratings=puzzles.ratings[rows],
    source_ids=puzzles.source_ids[rows],
  )


PATH = pathlib.Path(__file__).with_name("bank.npz")


def load_bank(board: board_lib.Board, path: pathlib.Path = PATH) -> Puzzles:
  """Loads all puzzles of one size from the bank.

  Args:
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
    content: the puzzles of each size, in storage order. Ratings above 65535 are
      stored as 65535.
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
