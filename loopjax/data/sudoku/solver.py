"""A Sudoku solver for many boards at once.

Candidates are sets of digits as bit masks, uint16 `[cells, N]`: the board is
the last axis, which makes every numpy operation run along contiguous memory.
"""

from typing import NamedTuple

import numpy as np

from loopjax.data.sudoku import board as board_lib

# Boards solved at a time: enough to amortise the overhead of numpy calls, few
# enough for their candidates to stay in the CPU cache.
_WIDTH = 2048

# The axes of the view [band, row, stack, column, N] that run over the cells of
# a row, of a column and of a box.
_UNIT_AXES = ((2, 3), (0, 1), (1, 3))


class Result(NamedTuple):
  """The results of solving N puzzles.

  Attributes:
    num_solutions: int32 `[N]`, at most `max_solutions`; -1 if the search ended
      before it knew.
    solutions: uint8 `[N, cells]`, one solution, or zeros if there is none.
    guesses: int32 `[N]`, the difficulty; see `solve`.
  """

  num_solutions: np.ndarray
  solutions: np.ndarray
  guesses: np.ndarray


def solve(
  board: board_lib.Board,
  puzzles: np.ndarray,
  max_solutions: int = 2,
  max_nodes: int | None = None,
) -> Result:
  """Solves puzzles; invalid puzzles have no solution.

  The search applies naked singles (a cell with one candidate) and hidden
  singles (a digit with one cell of a unit) until nothing changes. Then it
  guesses: it takes the cell with the fewest candidates, the first of them in
  row-major order, and tries each of its candidates.

  The difficulty `guesses` is the number of wrong guesses, which end in a
  contradiction, in an exhaustive search. It is 0 if singles are enough. For a
  puzzle with one solution, and `max_solutions` of at least 2, it depends only
  on the puzzle. The search of other puzzles stops at `max_solutions`, at an
  unspecified point, and their number of guesses is unspecified.

  Args:
    puzzles: `[N, cells]`.
    max_solutions: stop the search of a puzzle at this many solutions.
    max_nodes: end the search of all puzzles after about this many nodes of
      their trees. Some puzzles without a solution have millions.

  Returns:
    solutions, their numbers and difficulties.
  """
  candidates = candidates_of(board, puzzles)
  return solve_candidates(board, candidates, max_solutions, max_nodes)


def candidates_of(board: board_lib.Board, puzzles: np.ndarray) -> np.ndarray:
  """All digits for a blank and one for a given, `[N, cells] -> [cells, N]`."""
  bits = board_lib.digit_bits(board)
  bits[0] = 2**board.size - 1
  digits = np.asarray(puzzles).astype(np.uint8)
  # Without the copy the memory layout would be transposed.
  return bits[np.ascontiguousarray(digits.T)]


def digits_of(candidates: np.ndarray) -> np.ndarray:
  """The digit of each set of one candidate, `[cells, N] -> [N, cells]`."""
  below = np.bitwise_count(candidates - np.uint16(1))
  return np.ascontiguousarray((below + np.uint8(1)).T)


def tighten(
  board: board_lib.Board, candidates: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Removes candidates by naked and then by hidden singles, once.

  Args:
    candidates: uint16 `[cells, N]`.

  Returns:
    The remaining candidates, `[cells, N]`; bool `[N]`, contradictions found;
    bool `[N]`, solved boards.
  """
  bands, stacks = board.box_cols, board.box_rows
  shape = (bands, board.box_rows, stacks, board.box_cols, -1)
  cells = candidates.reshape(shape)
  several = (cells & (cells - np.uint16(1))) != 0
  single = cells * ~several
  dead = np.logical_not(candidates.all(axis=0))
  placed = np.zeros_like(cells)
  for axes in _UNIT_AXES:
    union = np.bitwise_or.reduce(single, axis=axes, keepdims=True)
    # If a digit is placed twice in a unit, the sum differs from the union.
    total = np.add.reduce(single, axis=axes, keepdims=True, dtype=np.uint16)
    dead |= (total != union).any(axis=(0, 1, 2, 3))
    placed |= union
  solved = ~several.any(axis=(0, 1, 2, 3)) & ~dead
  cells = np.where(several, cells & ~placed, cells)
  hidden = np.zeros_like(cells)
  for axes in _UNIT_AXES:
    union, twice = _seen(cells, axes)
    dead |= (union != 2**board.size - 1).any(axis=(0, 1, 2, 3))
    hidden |= union & ~twice
  hidden &= cells
  # A cell with two hidden singles keeps one; the next pass detects that the
  # other digit has no place.
  cells = np.where(hidden != 0, hidden & -hidden, cells)
  return cells.reshape(candidates.shape), dead, solved


def solve_candidates(
  board: board_lib.Board,
  candidates: np.ndarray,
  max_solutions: int,
  max_nodes: int | None = None,
) -> Result:
  """Solves boards given as candidates, `[cells, N]`; see `solve`."""
  num = candidates.shape[1]
  num_solutions = np.zeros(num, np.int32)
  guesses = np.zeros(num, np.int32)
  solutions = np.zeros((num, board.num_cells), np.uint8)
  # A stack of blocks of nodes of the search trees of all boards. A node is
  # its candidates, its board, and whether it is a guess (or else a root).
  stack = [(candidates, np.arange(num), np.zeros(num, bool))]
  num_nodes = 0
  while stack:
    if max_nodes is not None and num_nodes > max_nodes:
      break
    block = _pop(stack)
    num_nodes += block[1].size
    wanted = num_solutions[block[1]] < max_solutions
    cells, owner, guessed = _compress(block, wanted)
    tight, dead, solved = tighten(board, cells)
    np.add.at(guesses, owner[dead & guessed], 1)
    np.add.at(num_solutions, owner[solved], 1)
    solutions[owner[solved]] = digits_of(cells[:, solved])
    live = ~dead & ~solved
    stuck = (tight == cells).all(axis=0)
    rest = _compress((tight, owner, guessed), live & ~stuck)
    split = _compress((tight, owner, guessed), live & stuck)
    # Children on top: depth-first search keeps the stack small.
    stack += [block for block in (rest, _branch(split)) if block[1].size]
  num_solutions = np.minimum(num_solutions, max_solutions)
  for _, owner, _ in stack:  # Unless the search is complete.
    open_ = owner[num_solutions[owner] < max_solutions]
    num_solutions[open_] = -1
  return Result(num_solutions, solutions, guesses)


def _pop(stack):
  """Takes up to `_WIDTH` nodes from the top of the stack, as one block."""
  blocks, missing = [], _WIDTH
  while stack and missing:
    block = stack.pop()
    if block[1].size > missing:
      stack.append(tuple(part[..., missing:] for part in block))
      block = tuple(part[..., :missing] for part in block)
    blocks.append(block)
    missing -= block[1].size
  return tuple(
    np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True)
  )


def _compress(block, keep):
  """The nodes of a block where `keep` holds."""
  if keep.all():
    return block
  index = np.flatnonzero(keep)
  # Unlike part[..., index], take keeps the memory layout.
  return tuple(part.take(index, axis=-1) for part in block)


def _branch(block):
  """Opens a node for every candidate of the cell with the fewest."""
  cells, owner, _ = block
  count = np.bitwise_count(cells)
  count[count == 1] = 99  # Never guess known cells.
  target = count.argmin(axis=0)
  choices = cells[target, np.arange(owner.size)]
  digits = np.arange(16, dtype=np.uint16)[:, None]
  digit, parent = np.nonzero((choices >> digits) & np.uint16(1))
  children = cells.take(parent, axis=1)
  children[target[parent], np.arange(parent.size)] = 1 << digit
  return children, owner[parent], np.ones(parent.size, bool)


def _seen(cells, axes):
  """The digits seen in each unit, and those seen there more than once.

  Args:
    cells: candidates, `[band, row, stack, column, N]`.
    axes: the two axes that run over the cells of a unit.

  Returns:
    Two arrays of masks that keep the axes, with length 1.
  """
  # A loop over views: no numpy reduction computes the second result.
  members = np.moveaxis(cells, axes, (0, 1))
  members = [member for group in members for member in group]
  union, twice = members[0] | members[1], members[0] & members[1]
  for member in members[2:]:
    twice |= union & member
    union |= member
  return np.expand_dims(union, axes), np.expand_dims(twice, axes)
