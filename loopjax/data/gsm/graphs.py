"""Graphs of quantities with their values, and the split they belong to."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import structures
from loopjax.data.gsm.config import Config
from loopjax.data.gsm.language import (
  ABSENT,
  CONSTANT,
  DIFFERENCE,
  MAX_OPERANDS,
  PLUS,
  TIMES,
  TOTAL,
)
from loopjax.data.gsm.structures import MAX_NODES

COLUMNS = 3 + MAX_NODES  # Uniform numbers per node.
_MAX_FACTOR = 5
_PARTS = 8
_MAX_NAMED = 3


class Graphs(NamedTuple):
  """B graphs of at most 8 nodes; operands of a node come after it.

  Attributes:
    kinds: kind of each node, ABSENT after the last, int [B, 8].
    numbers: number of a CONSTANT, PLUS or TIMES, else 0, int [B, 8].
    num_operands: int [B, 8].
    operands: nodes of the operands, int [B, 8, 3]; arbitrary after the last.
    counted_by: node of the total that counts each node, or -1, int [B, 8].
    values: int [B, 8].
    answer_node: node whose value is the answer, int [B].
  """

  kinds: np.ndarray
  numbers: np.ndarray
  num_operands: np.ndarray
  operands: np.ndarray
  counted_by: np.ndarray
  values: np.ndarray
  answer_node: np.ndarray


def draw(
  config: Config,
  numbers: np.ndarray,
  operations: np.ndarray,
  reverse: np.ndarray,
) -> tuple[Graphs, np.ndarray]:
  """Draws graphs with given numbers of operations.

  Args:
    config: the task.
    numbers: uniform, [B, 8, COLUMNS].
    operations: 1 to 8, int [B].
    reverse: whether node 0 is a given total and the question asks for a
      constant, bool [B]; otherwise it asks for node 0. Must be False for one
      operation.

  Returns:
    The graphs, and which of them are valid, bool [B]: all values are in 1 ..
    max_value, and the question has a unique answer.
  """
  kinds, num_operands, operands, counted_by = structures.draw(
    numbers[:, :, 2:], operations, reverse
  )
  constants = draw_numbers(config, kinds, numbers[:, :, 0])
  values = np.zeros_like(kinds)
  for node in reversed(range(MAX_NODES)):
    here = np.s_[:, node : node + 1]
    operands[here], values[here] = arrange(
      kinds[here], constants[here], num_operands[here], operands[here], values
    )
  answer_node = np.zeros(len(kinds), np.int64)
  graphs = Graphs(
    kinds, constants, num_operands, operands, counted_by, values, answer_node
  )
  solvable = (kinds == CONSTANT) & (_influences(graphs) != 0)
  keys = np.where(solvable, 1 + numbers[:, :, 1], 0)
  answer_node[reverse] = np.argmax(keys, axis=1)[reverse]
  good = (
    (values >= (kinds != ABSENT)).all(axis=1)
    & (values <= config.max_value).all(axis=1)
    & (solvable.any(axis=1) | ~reverse)
  )
  return graphs, good


def until_good(
  draw: Callable[[int, np.ndarray], tuple[Sequence[np.ndarray], np.ndarray]],
  num: int,
) -> Sequence[np.ndarray]:
  """Draws rows, and redraws those that are invalid.

  Args:
    draw: (number of the attempt, rows [b]) -> arrays [b, ...] of these, and
      which of them are valid, bool [b].
    num: B, total number of rows.

  Returns:
    Arrays [B, ...].
  """
  left = np.arange(num)
  result, good = draw(0, left)
  for attempt in itertools.count(1):
    left = left[~good]
    if not left.size:
      break
    parts, good = draw(attempt, left)
    for whole, part in zip(result, parts, strict=True):
      whole[left] = part
  return result


def joined(graph: Graphs, others: Graphs) -> Graphs:
  """Joins each graph with its K graphs in `others`.

  Args:
    graph: B graphs of 8 nodes.
    others: B x K graphs of 8 nodes.

  Returns:
    B graphs of 8 (1 + K) nodes; `answer_node` is one node per part, int [B,
    1 + K].
  """
  num = len(graph.kinds)
  parts = Graphs(
    *(
      np.concatenate([one[:, None], more.reshape(num, -1, *one.shape[1:])], 1)
      for one, more in zip(graph, others, strict=True)
    )
  )
  first = MAX_NODES * np.arange(parts.answer_node.shape[1])
  counted_by = parts.counted_by + first[:, None] * (parts.counted_by >= 0)
  operands = parts.operands + first[:, None, None]
  parts = parts._replace(
    operands=operands,
    counted_by=counted_by,
    answer_node=parts.answer_node + first,
  )
  return Graphs(*(x.reshape(num, -1, *x.shape[3:]) for x in parts))


def draw_numbers(
  config: Config, kinds: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
  """A factor for TIMES, a constant for CONSTANT and PLUS, else 0."""
  constants = 1 + (uniform * config.max_constant).astype(np.int64)
  factors = 2 + (uniform * (_MAX_FACTOR - 1)).astype(np.int64)
  has_constant = (kinds == CONSTANT) | (kinds == PLUS)
  return np.where(kinds == TIMES, factors, np.where(has_constant, constants, 0))


def arrange(
  kinds: np.ndarray,
  numbers: np.ndarray,
  num_operands: np.ndarray,
  operands: np.ndarray,
  values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Puts the larger operand of a difference first, and computes the values.

  Args:
    kinds: int [B, S].
    numbers: int [B, S].
    num_operands: int [B, S].
    operands: nodes, int [B, S, 3].
    values: values of the nodes, int [B, N].

  Returns:
    Operands [B, S, 3], and resulting values, int [B, S].
  """
  rows = np.arange(len(values))[:, None, None]
  taken = np.arange(MAX_OPERANDS) < num_operands[..., None]
  at = values[rows, operands] * taken
  difference = kinds == DIFFERENCE
  swapped = difference & (at[..., 0] < at[..., 1])
  operands = np.where(swapped[..., None], operands[..., [1, 0, 2]], operands)
  sums = np.where(difference, np.abs(at[..., 0] - at[..., 1]), at.sum(axis=2))
  times = kinds == TIMES
  return operands, sums * np.where(times, numbers, 1) + numbers * ~times


def in_split(
  graphs: Graphs, operations: np.ndarray, titles: np.ndarray, split: str
) -> np.ndarray:
  """Whether problems belong to a split, by their hash.

  One in 8 is in the test split, one in 8 in validation. Two graphs that are the
  same up to names and order have the same hash, whatever the question asks for.
  A node's hash combines its kind, number and operands' hashes in any order (the
  values determine the order in a difference). Graphs that differ only in
  sharing also have the same hash.

  Ignoring names, there are few problems of up to three operations (with one
  operation, as many as constants): holding some out would remove a few numbers
  from the answers in training. For these, the name of node 0 is part of the
  problem.

  Args:
    graphs: the problems.
    operations: int [B].
    titles: numbers of node 0's name if it is a total, and if it is not, int
      [B, 2].
    split: "train", "validation" or "test".

  Returns:
    bool [B].
  """
  rows = np.arange(len(operations))[:, None]
  hashes = np.zeros(graphs.kinds.shape, np.uint64)
  slots = np.arange(MAX_OPERANDS)
  for node in reversed(range(MAX_NODES)):
    taken = slots < graphs.num_operands[:, node, None]
    parts = hashes[rows, graphs.operands[:, node]] * taken
    label = 16 * graphs.numbers[:, node] + graphs.kinds[:, node]
    hashes[:, node] = pipeline.splitmix64(
      parts.sum(axis=1, dtype=np.uint64) + _scrambled(label)
    )
  title = np.where(graphs.kinds[:, 0] == TOTAL, titles[:, 0], titles[:, 1])
  name = np.where(operations <= _MAX_NAMED, 1 + title, 0)
  hashes = pipeline.splitmix64(hashes[:, 0] + _scrambled(name))
  part = hashes % np.uint64(_PARTS)
  return {"train": part > 1, "validation": part == 1, "test": part == 0}[split]


def _influences(graphs: Graphs) -> np.ndarray:
  """Derivative of node 0 with respect to each node, int [B, 8].

  Values are linear: a constant follows from node 0 if this is not 0.
  """
  rows = np.arange(len(graphs.kinds))
  influences = np.zeros(graphs.kinds.shape, np.int64)
  influences[:, 0] = 1
  for node in range(MAX_NODES):
    kind = graphs.kinds[:, node]
    factor = np.where(kind == TIMES, graphs.numbers[:, node], 1)
    for slot in range(MAX_OPERANDS):
      sign = np.where((kind == DIFFERENCE) & (slot == 1), -1, 1)
      taken = slot < graphs.num_operands[:, node]
      influences[rows, graphs.operands[:, node, slot]] += (
        influences[:, node] * factor * sign * taken
      )
  return influences


def _scrambled(values: np.ndarray) -> np.ndarray:
  return pipeline.splitmix64(values.astype(np.uint64))
