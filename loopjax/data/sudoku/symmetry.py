"""Symmetries of Sudoku: random symmetries, class keys, and splits.

A symmetry renames the digits, permutes the bands, the rows within each band,
the stacks and the columns within each stack, and for square boxes may also
transpose the board. It maps solutions to solutions and puzzles with one
solution to puzzles with one solution.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.sudoku import board as board_lib

# Chosen among small integers such that the test split has a fifth of the 6x6
# and 9x9 grids, and exactly the smaller of the two classes of 4x4 grids (96 of
# the 288 grids).
_SPLIT_SALT = 525

# Grids whose class key is computed at a time, to bound memory.
_KEY_CHUNK = 1024


class Symmetry(NamedTuple):
  """N symmetries of one board.

  Attributes:
    cell_permutation: int64 `[N, cells]`; cell i of the result is taken from
      this cell of the argument.
    relabelling: uint8 `[N, size + 1]`; the new name of every digit. Entry 0
      is 0: a blank stays a blank.
  """

  cell_permutation: np.ndarray
  relabelling: np.ndarray


def num_uniforms(board: board_lib.Board) -> int:
  """The number of random numbers that determine one symmetry."""
  # One for each permutation of bands, stacks, rows of a band and columns of
  # a stack; one for the transposition; one sort key for each digit.
  return 2 + board.box_cols + board.box_rows + 1 + board.size


def from_uniforms(board: board_lib.Board, uniforms: np.ndarray) -> Symmetry:
  """Makes symmetries, all equally likely, from given random numbers.

  Args:
    uniforms: floats in [0, 1), independent and uniform,
      `[N, num_uniforms(board)]`.

  Returns:
    N symmetries.
  """
  bands, stacks = board.box_cols, board.box_rows
  lines, flip, digits = np.split(uniforms, [2 + bands + stacks, -board.size], 1)
  by_row, by_column = lines[:, : 1 + bands], lines[:, 1 + bands :]
  row = _line_permutations(bands, board.box_rows, by_row)
  column = _line_permutations(stacks, board.box_cols, by_column)
  row *= board.size
  cells = row[:, :, None] + column[:, None, :]
  if board.box_rows == board.box_cols:
    transposed = np.flatnonzero(flip[:, 0] < 0.5)
    cells[transposed] = cells[transposed].swapaxes(1, 2)
  relabelling = np.zeros((len(uniforms), board.size + 1), np.uint8)
  relabelling[:, 1:] = np.argsort(digits, axis=1) + 1
  return Symmetry(cells.reshape(-1, board.num_cells), relabelling)


def apply(symmetry: Symmetry, boards: np.ndarray) -> np.ndarray:
  """Applies symmetry n to board n.

  Args:
    symmetry: N symmetries.
    boards: `[N, cells]`, puzzles or solutions.

  Returns:
    uint8 `[N, cells]`.
  """
  cells, names = symmetry
  # Flat indices are several times faster than take_along_axis.
  first_cell = np.arange(len(cells))[:, None] * cells.shape[1]
  first_name = np.arange(len(names))[:, None] * names.shape[1]
  moved = np.ascontiguousarray(boards).ravel()[cells + first_cell]
  return names.ravel()[moved + first_name]


def class_key(board: board_lib.Board, grids: np.ndarray) -> np.ndarray:
  """Computes a hash that is invariant under symmetries.

  Two grids with different keys are not symmetric to each other. The converse
  mostly holds too, but not always.

  Any two rows of a solution define a permutation of the columns: from the place
  of a digit in one row to its place in the other. Its cycle lengths do not
  depend on the order of the columns, and neither does the number of columns
  that remain in their stack when it is applied once, twice and so on. A row is
  described by these numbers for the other rows of its band and for the rows of
  other bands, a band by its rows, and the board by its bands; the same for
  columns.

  Args:
    grids: solutions, `[N, cells]`.

  Returns:
    uint64 `[N]`.
  """
  size = board.size
  keys = np.empty(len(grids), np.uint64)
  for start in range(0, len(grids), _KEY_CHUNK):
    part = slice(start, start + _KEY_CHUNK)
    # Boards last: numpy then works along contiguous memory.
    square = np.asarray(grids[part]).T.reshape(size, size, -1)
    by_columns = _line_key(square, board.box_rows, board.box_cols)
    turned = square.swapaxes(0, 1)
    by_rows = _line_key(turned, board.box_cols, board.box_rows)
    if board.box_rows != board.box_cols:
      by_columns = pipeline.splitmix64(
        by_columns
      )  # Rows and columns cannot be exchanged.
    keys[part] = pipeline.splitmix64(by_rows) + pipeline.splitmix64(by_columns)
  return keys


def place(class_keys: np.ndarray) -> np.ndarray:
  """Numbers in [0, 1) that determine splits, float64 `[N]`, from class keys.

  Symmetric grids have the same number and are in the same split.
  """
  return pipeline.splitmix64(class_keys ^ np.uint64(_SPLIT_SALT)) / 2.0**64


def _line_permutations(num_groups, group_size, uniforms):
  """Permutes groups, and lines within each, `[N, groups * group_size]`."""
  groups = _table_permutations(num_groups, uniforms[:, 0])
  within = _table_permutations(group_size, uniforms[:, 1:])
  lines = groups[:, :, None] * group_size + within
  return lines.reshape(len(uniforms), -1)


def _table_permutations(length, uniforms):
  """Looks up a permutation of `length` for every uniform."""
  table = np.array(list(itertools.permutations(range(length))))
  # The product may round up to the number of permutations for float32.
  index = (uniforms * len(table)).astype(np.int64)
  return table[np.minimum(index, len(table) - 1)]


def _line_key(square, place_group, line_group):
  """Hashes how all pairs of columns are related.

  Args:
    square: digits by row and column, `[size, size, N]`; swap these two axes
      to hash the rows.
    place_group: rows in a band.
    line_group: columns in a stack.

  Returns:
    uint64 `[N]`.
  """
  size, _, num = square.shape
  first, second = np.triu_indices(size, 1)
  pairs = np.zeros((size, size, num), np.uint64)
  pairs[first, second] = pairs[second, first] = _pair_hashes(
    square, first, second, place_group
  )
  group = np.arange(size) // line_group
  inside = (group[:, None] == group)[:, :, None]
  # Sums, not chains, of hashes: the order of lines must not matter.
  same_group = (pairs * inside).sum(axis=0)
  lines = pipeline.splitmix64(
    pipeline.splitmix64(same_group) + (pairs * ~inside).sum(axis=0)
  )
  groups = pipeline.splitmix64(lines.reshape(-1, line_group, num).sum(axis=1))
  return groups.sum(axis=0)


def _pair_hashes(square, first, second, place_group):
  """Hashes invariants of the permutation from one line to another.

  Args:
    square: digits by place and line, `[size, size, N]`.
    first, second: the lines of every pair, `[pairs]`.
    place_group: number of consecutive places that form a group.

  Returns:
    uint64 `[pairs, N]`; exchanging the two lines does not change it.
  """
  size, _, num = square.shape
  front, back, hashes = _permutation_table(size, place_group)
  here = np.arange(size * num, dtype=np.int32).reshape(size, num)
  digit = (square - np.int32(1)) * np.int32(size * num)
  place = np.empty(square.size, np.int32)  # By digit, line and board.
  place[digit + here] = np.arange(size, dtype=np.int32)[:, None, None]
  images = [place.take(digit[p, second] + here[first]) for p in range(size)]

  def number(digits):
    return functools.reduce(lambda high, low: high * size + low, digits)

  half = size // 2
  rank = front.take(number(images[:half])) + back.take(number(images[half:]))
  return hashes.take(rank)


@functools.cache
def _permutation_table(size, place_group):
  """Tables to look up the invariants of a permutation of the places.

  The invariants are its cycle lengths, and how many places stay in their group
  when it is applied once, twice and so on.

  Returns:
    Two int32 tables, whose entries for the first half of the images and for the
    others, read as numbers of base `size`, add up to the rank of the
    permutation; and a uint64 hash for every rank.
  """
  images = itertools.chain.from_iterable(itertools.permutations(range(size)))
  step = np.fromiter(images, np.int8).reshape(-1, size)
  rank = np.arange(len(step), dtype=np.int32)
  # Permutations are in lexicographic order: the last images vary fastest.
  half, base = size // 2, size ** np.arange(size)[::-1]
  front, back = (np.zeros(size**n, np.int32) for n in (half, size - half))
  turn = math.factorial(size - half)
  front[step[:, :half] @ base[-half:]] = rank - rank % turn
  back[step[:, half:] @ base[half:]] = rank % turn
  here = np.arange(size, dtype=np.int8)
  power, code = step, np.zeros(len(step), np.uint64)
  # At most one cycle is longer than half the size: the fixed points of the
  # powers up to half the size determine all cycle lengths.
  for _ in range(size // 2):
    for kept in (power == here, power // place_group == here // place_group):
      count = kept.sum(axis=1, dtype=np.uint8)
      code = code * np.uint64(size + 1) + count
    power = np.take_along_axis(step, power, axis=1)
  return front, back, pipeline.splitmix64(code)
