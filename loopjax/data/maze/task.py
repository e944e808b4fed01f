"""The maze task: read a maze, mark a shortest path from S to G.

Tokens are as in Maze-Hard (HRM, arXiv 2506.21734): 0 is padding (never
seen), then `#` wall, ` ` free, `S`, `G` and `o`, the path. Mazes are our own;
Maze-Hard's have scattered walls.

A maze is a lattice of n x n rooms. Depth-first search carves a spanning tree of
long, winding corridors; a few more walls are opened, which creates alternatives
to the shortest path. Many mazes are made at once: the leading axis of every
array is the maze.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import MAX_LENGTH, Array, Batch, Dataset, Output, TaskSpec

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


def make_mazes(
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
  far_enough = flat >= np.minimum(min_length, flat.max(axis=1))[:, None]
  goal = _choice(far_enough, ends[:, 1])
  on_path = _shortest_path(is_open, distance, goal)
  length = flat[np.arange(len(goal)), goal]
  return Mazes(is_open, start, goal, on_path, length)


def _choice(allowed: np.ndarray, number: np.ndarray) -> np.ndarray:
  """A random true column per row of bool [B, N], from uniform numbers [B]."""
  rank = np.cumsum(allowed, axis=1) - 1
  chosen_rank = (number * allowed.sum(axis=1)).astype(np.int64)
  return np.argmax(allowed & (rank == chosen_rank[:, None]), axis=1)


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
    room = stack[maze, top]
    free = ~visited[maze[:, None], room[:, None] + moves]
    move = _choice(free, number)
    can_move = free.any(axis=1)
    target = np.where(can_move, room + moves[move], room)
    is_open[maze, room, move] |= can_move
    is_open[maze, target, 3 - move] |= can_move
    visited[maze, target] = True
    top = np.where(can_move, top + 1, np.maximum(top - 1, 0))
    stack[maze, top] = np.where(can_move, target, stack[maze, top])
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
  """Steps from the start to every room, int64 [B, n, n].

  One byte holds the same room of eight mazes.
  """
  num_mazes, num_rooms = is_open.shape[:2]
  ways = np.moveaxis(np.packbits(is_open, axis=0), 0, -1)  # [n, n, 4, B / 8]
  up, left, right, down = (
    np.ascontiguousarray(ways[:, :, way]) for way in (_UP, _LEFT, _RIGHT, _DOWN)
  )
  first = np.zeros((num_rooms**2, num_mazes), bool)
  first[start, np.arange(num_mazes)] = True
  reached = np.packbits(first, axis=1).reshape(up.shape)
  distance = np.zeros((num_rooms, num_rooms, num_mazes), np.int64)
  while (far := np.unpackbits(~reached, axis=2, count=num_mazes)).any():
    distance += far
    before = reached.copy()
    reached[:-1] |= (before & up)[1:]
    reached[:, :-1] |= (before & left)[:, 1:]
    reached[:, 1:] |= (before & right)[:, :-1]
    reached[1:] |= (before & down)[:-1]
    assert not np.array_equal(reached, before), "a room has no way to it"
  return np.moveaxis(distance, 2, 0).copy()


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
  passages = is_open.reshape(num_mazes, -1, 4)
  on_path, room = np.zeros_like(passages), goal
  for _ in range(int(flat[maze, goal].max())):
    remaining = flat[maze, room]
    # No way leads across the border.
    neighbours = np.clip(room[:, None] + moves, 0, num_rooms**2 - 1)
    closer = flat[maze[:, None], neighbours] == remaining[:, None] - 1
    move = np.argmax(passages[maze, room] & closer, axis=1)
    is_moving = remaining > 0
    next_room = np.where(is_moving, neighbours[maze, move], room)
    on_path[maze, room, move] |= is_moving
    on_path[maze, next_room, 3 - move] |= is_moving
    room = next_room
  return on_path.reshape(is_open.shape)


def to_grid(ways: np.ndarray, nothing: int, something: int) -> np.ndarray:
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


WALL, FREE, START, GOAL, PATH = range(1, 6)
LENGTH_EDGES = (0, 20, 50, 110)  # Maze-Hard's paths have over 110 steps.
TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("shortest_path", "path_overlap")
_STREAMS = {"train": 0, "test": 1, "validation": 2}
_MAX_SIZE = math.isqrt(MAX_LENGTH)


@dataclasses.dataclass(frozen=True)
class Config:
  """Size and difficulty.

  Attributes:
    size: rows and columns of the grid, even; rooms are at every second row and
      column.
    min_path: minimum steps of the shortest path, if the maze has one that long
      from its start.
    openness: probability that a wall between two rooms is opened after a
      spanning tree is carved; 0 gives one path between any two rooms.
    num_train_mazes: train on this many mazes; 0 for an endless stream.
    augment: rotate and reflect a maze at random each time it is used in
      training.
    num_eval_examples: number in validation, and in the test split.
    eval_seed: seed of both; training uses the run's seed.
  """

  size: int = checks.setting(30, least=4)
  min_path: int = checks.setting(110, least=1)
  openness: float = checks.setting(0.05, within="[0, 1]")
  num_train_mazes: int = checks.setting(0, least=0)
  augment: bool = False
  num_eval_examples: int = checks.setting(1000, least=1)
  eval_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    if not self.num_train_mazes:
      checks.without_effect("task", self, "num_train_mazes", "augment")
    if self.size % 2 or self.size > _MAX_SIZE:
      raise UserError(
        f"task.size={self.size} must be even and at most {_MAX_SIZE}"
      )


def spec(config: Config) -> TaskSpec:
  """Vocabulary, length and (row, column) of every cell."""
  places = np.indices((config.size, config.size)).reshape(2, -1).T
  return TaskSpec(
    vocab_size=PATH + 1,
    sequence_length=config.size**2,
    coordinates=tuple(map(tuple, places.tolist())),
    coordinate_names=("row", "column"),
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, config.size**2)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split.

  Splits are drawn from separate random streams. There are too many mazes of
  more than a few rooms to repeat.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b]
    and "group/path" i32 [b].
  """
  base = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], 0, base)

  def make(indices):
    batch, length = examples(config, stream, indices)
    if split == "train":
      return batch
    group = np.searchsorted(LENGTH_EDGES, length, "right") - 1
    return {**batch, "group/path": group.astype(np.int32)}

  if split == "train" and config.num_train_mazes:
    num_examples = config.num_train_mazes
    turns = pipeline.stream_seed(_STREAMS[split], 1, seed)

    def make_again(indices, positions):
      batch = make(indices)
      if not config.augment:
        return batch
      chosen = pipeline.uniforms(turns, positions, 1)[:, 0]
      return turned(batch, (8 * chosen).astype(int))

    batches = pipeline.training_batches(
      make_again, num_examples, batch_size, seed, rows
    )
    return Dataset(batches, facts={"train_examples": num_examples})
  groups = {"path": pipeline.range_names(LENGTH_EDGES)}
  return pipeline.generated(
    make, split, config.num_eval_examples, batch_size, rows, groups=groups
  )


def examples(
  config: Config, stream: int, indices: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """(a batch of mazes of a stream, the steps of their shortest paths [b])."""
  rooms = config.size // 2
  numbers = pipeline.uniforms(stream, indices, num_uniforms(rooms))
  min_steps = -(
    -config.min_path // 2
  )  # A step between rooms is two grid steps.
  mazes = make_mazes(numbers, rooms, config.openness, min_steps)
  inputs = to_grid(mazes.open, WALL, FREE)
  targets = np.where(to_grid(mazes.on_path, FREE, PATH) == PATH, PATH, inputs)
  maze = np.arange(len(indices))
  for room, token in ((mazes.start, START), (mazes.goal, GOAL)):
    place = maze, 2 * (room // rooms), 2 * (room % rooms)
    inputs[place] = targets[place] = token
  tokens = (len(indices), -1)
  batch = {
    "inputs": inputs.reshape(tokens),
    "targets": targets.reshape(tokens),
    "weights": np.ones((len(indices), config.size**2), np.float32),
  }
  return batch, 2 * mazes.length


def turned(
  batch: dict[str, np.ndarray], symmetries: np.ndarray
) -> dict[str, np.ndarray]:
  """The batch with a symmetry of the square, 0 to 7, applied to each maze."""

  def apply(tokens: np.ndarray) -> np.ndarray:
    size = round(tokens.shape[1] ** 0.5)
    grids = tokens.reshape(-1, size, size).copy()
    for grid, symmetry in zip(grids, symmetries, strict=True):
      rooms = grid[:-1, :-1]  # Everything else is walls.
      reflected = rooms.T if symmetry >= 4 else rooms
      grid[:-1, :-1] = np.rot90(reflected, symmetry % 4).copy()
    return grids.reshape(tokens.shape)

  return {**batch, **{k: apply(batch[k]) for k in ("inputs", "targets")}}


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "shortest_path": the marked cells are a shortest path from S to G through free
  cells, not necessarily the one in the targets; "exact_match": every cell is as
  in the targets (HRM, TRM); "path_overlap": cells marked in both answer and
  targets, divided by cells marked in either; "loss": mean cross-entropy of all
  cells in nats.
  """
  targets = batch["targets"]
  losses, predicted = token_losses.scores(output, targets)
  path, target_path = predicted == PATH, targets == PATH
  intersection = jnp.sum(path & target_path, axis=1)
  union = jnp.sum(path | target_path, axis=1)
  leads = check_answer(None, batch, predicted) > 0
  is_shortest = jnp.sum(path, axis=1) == jnp.sum(target_path, axis=1)
  return {
    "shortest_path": (leads & is_shortest).astype(jnp.float32),
    "exact_match": jnp.all(predicted == targets, axis=1).astype(jnp.float32),
    "path_overlap": intersection.astype(jnp.float32)
    / jnp.maximum(union, 1).astype(jnp.float32),
    "loss": jnp.mean(losses, axis=1),
  }


def check_answer(config: Any, batch: Batch, predicted: Array) -> Array:
  """How short a marked path through free cells is, f32 [B].

  1 / (1 + marked cells), or 0 if they do not connect S and G or are not free.
  Does not read the solution.

  Args:
    predicted: tokens, i32 [B, T].
  """
  del config  # The grid is square.
  inputs, path = batch["inputs"], predicted == PATH
  leads = jnp.all(~path | (inputs == FREE), axis=1) & _leads(inputs, path)
  length = jnp.sum(path, axis=1, dtype=jnp.float32)
  return jnp.where(leads, 1 / (1 + length), 0.0)


def _leads(inputs: Array, path: Array) -> Array:
  """Whether marked cells connect S and G, bool [B]."""
  num, size = len(inputs), round(inputs.shape[1] ** 0.5)
  cells = (num, size, size)
  goal = (inputs == GOAL).reshape(cells)
  passable = path.reshape(cells) | goal

  def spread(reached: Array) -> Array:
    padded = jnp.pad(reached, ((0, 0), (1, 1), (1, 1)))
    neighbours = padded[:, :-2, 1:-1] | padded[:, 2:, 1:-1]
    neighbours |= padded[:, 1:-1, :-2] | padded[:, 1:-1, 2:]
    return reached | (neighbours & passable)

  def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
    return spread(carry[0]), carry[0]

  start = (inputs == START).reshape(cells)
  reached, _ = jax.lax.while_loop(
    lambda carry: jnp.any(carry[0] != carry[1]), body, (spread(start), start)
  )
  return jnp.any(reached & goal, axis=(1, 2))
