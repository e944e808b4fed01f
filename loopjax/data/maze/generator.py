"""Random mazes with a shortest path, many at once.

A maze is a lattice of n x n rooms. Depth-first search carves a spanning tree of
long, winding corridors; a few more walls are opened, which creates alternatives
to the shortest path. The leading axis of every array is the maze.
"""

from typing import NamedTuple

import numpy as np

# Steps up, left, right and down; 3 - d is the reverse of d.
_UP, _LEFT, _RIGHT, _DOWN = range(4)


class Mazes(NamedTuple):
  """B mazes of n x n rooms.

  Attributes:
    open: whether one can leave a room in each direction, bool [B, n, n, 4].
    start, goal: rooms, numbered in row-major order, int [B].
    on_path: the same for steps of the shortest path, in both directions.
    length: steps of that path, int [B].
  """

  open: np.ndarray
  start: np.ndarray
  goal: np.ndarray
  on_path: np.ndarray
  length: np.ndarray


def num_uniforms(num_rooms: int) -> int:
  """Random numbers for a maze of n x n rooms."""
  return 4 * num_rooms**2 + 2


def make(
  numbers: np.ndarray, num_rooms: int, openness: float, min_length: int
) -> Mazes:
  """Makes a maze of each row of random numbers.

  Args:
    numbers: uniform in [0, 1), [B, num_uniforms].
    num_rooms: n.
    openness: probability that a remaining wall between two rooms is opened.
    min_length: minimum length of the shortest path, in steps between rooms. The
      start is uniform; the goal is uniform among the rooms at least this far
      away, or among the farthest rooms if there are none.
  """
  tree, walls, ends = np.split(
    numbers, [2 * num_rooms**2, 4 * num_rooms**2], axis=1
  )
  is_open = _carved(tree, num_rooms)
  _open_more(is_open, walls < openness)
  start = (ends[:, 0] * num_rooms**2).astype(np.int64)
  distance = _distances(is_open, start)
  flat = distance.reshape(len(start), -1)
  far = flat >= np.minimum(min_length, flat.max(axis=1))[:, None]
  goal = _choice(far, ends[:, 1])
  on_path = _shortest_path(is_open, distance, goal)
  length = flat[np.arange(len(goal)), goal]
  return Mazes(is_open, start, goal, on_path, length)


def _choice(among: np.ndarray, number: np.ndarray) -> np.ndarray:
  """A random true column per row of bool [B, N], from uniform numbers [B]."""
  rank = np.cumsum(among, axis=1) - 1
  wanted = (number * among.sum(axis=1)).astype(np.int64)
  return np.argmax(among & (rank == wanted[:, None]), axis=1)


def _carved(numbers: np.ndarray, num_rooms: int) -> np.ndarray:
  """A spanning tree by depth-first search: open, bool [B, n, n, 4]."""
  num_mazes, width = len(numbers), num_rooms + 2  # With a border, visited.
  maze = np.arange(num_mazes)
  moves = np.array([-width, -1, 1, width])
  inside = np.zeros((num_mazes, width, width), bool)
  inside[:, 1:-1, 1:-1] = True
  visited = ~inside.reshape(num_mazes, -1)
  is_open = np.zeros((num_mazes, width * width, 4), bool)
  stack = np.zeros((num_mazes, num_rooms**2), np.int64)
  stack[:, 0] = width + 1
  visited[:, width + 1] = True
  top = np.zeros(num_mazes, np.int64)
  for number in numbers.T:  # Each room is entered once and left once.
    here = stack[maze, top]
    free = ~visited[maze[:, None], here[:, None] + moves]
    move = _choice(free, number)
    goes_on = free.any(axis=1)
    there = np.where(goes_on, here + moves[move], here)
    is_open[maze, here, move] |= goes_on
    is_open[maze, there, 3 - move] |= goes_on
    visited[maze, there] = True
    top = np.where(goes_on, top + 1, np.maximum(top - 1, 0))
    stack[maze, top] = np.where(goes_on, there, stack[maze, top])
  shape = (num_mazes, width, width, 4)
  return is_open.reshape(shape)[:, 1:-1, 1:-1].copy()


def _open_more(is_open: np.ndarray, chosen: np.ndarray) -> None:
  """Opens walls to the right of rooms and below them, in place.

  chosen: bool [B, 2 n^2].
  """
  num_mazes, num_rooms = is_open.shape[:2]
  right, down = chosen.reshape(num_mazes, 2, num_rooms, num_rooms).swapaxes(
    0, 1
  )
  is_open[:, :, :-1, _RIGHT] |= right[:, :, :-1]
  is_open[:, :, 1:, _LEFT] |= right[:, :, :-1]
  is_open[:, :-1, :, _DOWN] |= down[:, :-1]
  is_open[:, 1:, :, _UP] |= down[:, :-1]


def _distances(is_open: np.ndarray, start: np.ndarray) -> np.ndarray:
  """Steps from the start to every room, int64 [B, n, n]."""
  num_mazes, num_rooms = is_open.shape[:2]
  reached = np.zeros((num_mazes, num_rooms**2), bool)
  reached[np.arange(num_mazes), start] = True
  reached = reached.reshape(num_mazes, num_rooms, num_rooms)
  frontier, distance, steps = reached.copy(), np.zeros(reached.shape, int), 0
  while frontier.any():
    steps += 1
    leaving = frontier[..., None] & is_open
    frontier = np.zeros_like(reached)
    frontier[:, :-1] |= leaving[:, 1:, :, _UP]
    frontier[:, :, :-1] |= leaving[:, :, 1:, _LEFT]
    frontier[:, :, 1:] |= leaving[:, :, :-1, _RIGHT]
    frontier[:, 1:] |= leaving[:, :-1, :, _DOWN]
    frontier &= ~reached
    reached |= frontier
    distance[frontier] = steps
  assert reached.all(), "every room of a spanning tree is reached"
  return distance


def _shortest_path(
  is_open: np.ndarray, distance: np.ndarray, goal: np.ndarray
) -> np.ndarray:
  """Steps of a shortest path, bool [B, n, n, 4].

  Ties are broken deterministically: from the goal back, the path prefers up,
  then left, right, down.
  """
  num_mazes, num_rooms = is_open.shape[:2]
  maze, moves = np.arange(num_mazes), np.array([-num_rooms, -1, 1, num_rooms])
  flat = distance.reshape(num_mazes, -1)
  ways = is_open.reshape(num_mazes, -1, 4)
  on_path, here = np.zeros_like(ways), goal
  for _ in range(int(flat[maze, goal].max())):
    left = flat[maze, here]
    # No way leads across the border.
    there = np.clip(here[:, None] + moves, 0, num_rooms**2 - 1)
    closer = flat[maze[:, None], there] == left[:, None] - 1
    move = np.argmax(ways[maze, here] & closer, axis=1)
    goes_on = left > 0
    after = np.where(goes_on, there[maze, move], here)
    on_path[maze, here, move] |= goes_on
    on_path[maze, after, 3 - move] |= goes_on
    here = after
  return on_path.reshape(is_open.shape)


def drawn(ways: np.ndarray, nothing: int, something: int) -> np.ndarray:
  """Rooms and the ways between them, on a grid of twice the size.

  Args:
    ways: bool [B, n, n, 4], as in `Mazes`; a room is drawn if it has a way.
    nothing, something: values of the grid.

  Returns:
    int32 [B, 2 n, 2 n]; room (i, j) is at (2 i, 2 j).
  """
  num_mazes, num_rooms = ways.shape[:2]
  shape = (num_mazes, 2 * num_rooms, 2 * num_rooms)
  grid = np.full(shape, nothing, np.int32)
  grid[:, ::2, ::2][ways.any(axis=-1)] = something
  grid[:, ::2, 1::2][ways[..., _RIGHT]] = something
  grid[:, 1::2, ::2][ways[..., _DOWN]] = something
  return grid
