"""Puzzles with their solutions, packed into a third of the bytes.

A question equals its answer in the given cells and is blank elsewhere. Both
together take 52 bytes for a 9x9 board, in memory and in files.
"""

from typing import NamedTuple

import numpy as np

from loopjax.data.sudoku import symmetry
from loopjax.data.sudoku.board import Board


class Puzzles(NamedTuple):
  """N puzzles.

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
    sha256: checksum of the file they are from; "" for the packaged ones.
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
  """Questions and answers, uint8 `[n, cells]` each, of packed ones."""
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
