"""Graphs of quantities with their values, and the split they belong to.

A graph is drawn backwards from its final quantity, which then depends on all
others with an exact number of operations. An operation is an edge into a
quantity: every operand, every item that a total counts, and every constant is
one (the count of GSM-Infinite, arXiv 2502.05252).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm.config import MAX_OPERATIONS, Config
from loopjax.data.gsm.language import (
  ABSENT,
  CONSTANT,
  DIFFERENCE,
  EQUAL,
  MAX_OPERANDS,
  PLUS,
  SUM,
  TIMES,
  TOTAL,
)

MAX_NODES = MAX_OPERATIONS  # Each has at least one operation.
WITH_NUMBER = (CONSTANT, PLUS, TIMES)
_NUM_OPERANDS = {
  CONSTANT: (0,),
  EQUAL: (1,),
  PLUS: (1,),
  TIMES: (1,),
  SUM: (2, 3),
  DIFFERENCE: (2,),
  TOTAL: (1, 2, 3),
}
# Kind, number of operands, how many of these are shared with other nodes.
_OPTIONS = np.array(
  [(ABSENT, 0, 0)]
  + [
    (kind, num, shared)
    for kind, nums in _NUM_OPERANDS.items()
    for num in nums
    for shared in range(1 if kind == TOTAL else num + 1)
  ]
)
_ANY, _ITEM, _TOTAL = range(3)  # Roles of a quantity.


def draw_structures(
  numbers: np.ndarray, operations: np.ndarray, reverse: np.ndarray
) -> tuple[np.ndarray, ...]:
  """Draws nodes one by one: kind, and operands, some shared with other nodes.

  Operations are spent such that enough remain for all nodes that still need
  operands, and none remain when no node does.

  Args:
    numbers: uniform, [B, 8, 9]: one for the kind, and one for each node, which
      decides whether it is shared.
    operations: int [B].
    reverse: whether node 0 must be a total, bool [B].

  Returns:
    Kinds and num_operands int [B, 8], operands int [B, 8, 3] and counted_by int
    [B, 8], as in `graphs.Graphs`.
  """
  shape = numbers.shape[:2]
  kinds, num_operands = np.zeros((2, *shape), np.int64)
  operands = np.zeros((*shape, MAX_OPERANDS), np.int64)
  counted_by = np.full(shape, -1)
  nodes, slots = np.arange(MAX_NODES), np.arange(MAX_OPERANDS)
  rows = np.arange(len(numbers))
  remaining, created = operations, np.ones(len(numbers), np.int64)
  role = np.where(reverse, _TOTAL, _ANY)
  for node in range(MAX_NODES):
    others = np.maximum(created - node - 1, 0)
    cumulative = _CUMULATIVE[role, others, remaining]
    option = (numbers[:, node, :1] >= cumulative).sum(axis=1)
    kind, num, shared = _OPTIONS[option].T
    may_share = (nodes > node) & (nodes < created[:, None])
    keys = np.where(may_share, numbers[:, node, 1:], 1.0)
    old = np.argsort(keys, axis=1, kind="stable")[:, :MAX_OPERANDS]
    new = created[:, None] + slots - shared[:, None]
    is_operand = slots < num[:, None]
    chosen = np.where(slots < shared[:, None], old, new) * is_operand
    for slot in slots:
      counted = is_operand[:, slot] & (kind == TOTAL)
      counted_by[rows[counted], chosen[counted, slot]] = node
    kinds[:, node], num_operands[:, node], operands[:, node] = kind, num, chosen
    created = created + num - shared
    remaining = remaining - num - np.isin(kind, WITH_NUMBER)
    if node + 1 < MAX_NODES:
      role = np.where(counted_by[:, node + 1] >= 0, _ITEM, _ANY)
  return kinds, num_operands, operands, counted_by


def _cumulative_probabilities() -> np.ndarray:
  """Cumulative probabilities of options by role, waiting nodes and operations.

  Kinds are equally likely, as are the options of a kind, among those that can
  be completed.

  Returns:
    float64 [3, 8, 9, options], 0 where there is no option.
  """
  kinds, nums, shared = _OPTIONS.T
  costs = nums + np.isin(kinds, WITH_NUMBER)
  probabilities = np.zeros((3, MAX_NODES, MAX_NODES + 1, len(_OPTIONS)))
  probabilities[:, :, 0, 0] = 1  # After the last node.
  for role, others, remaining in itertools.product(
    *map(range, probabilities.shape[:3])
  ):
    waiting, after = others + nums - shared, remaining - costs
    fits = (kinds != ABSENT) & (shared <= others)
    fits &= (after >= waiting) & ((waiting > 0) | (after == 0))
    if role != _ANY:
      fits &= (kinds == TOTAL) == (role == _TOTAL)
    for kind in _NUM_OPERANDS:
      options = fits & (kinds == kind)
      probabilities[role, others, remaining] += options / max(options.sum(), 1)
  sums = np.cumsum(probabilities, axis=-1)
  return sums / np.where(sums[..., -1:] > 0, sums[..., -1:], 1)


_CUMULATIVE = _cumulative_probabilities()


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
    numbers: uniform, [B, 8, COLUMNS].
    operations: 1 to 8, int [B].
    reverse: whether node 0 is a given total and the question asks for a
      constant, bool [B]; otherwise it asks for node 0. Must be False for one
      operation.

  Returns:
    The graphs, and which of them are valid, bool [B]: all values are in 1 ..
    max_value, and the question has a unique answer.
  """
  kinds, num_operands, operands, counted_by = draw_structures(
    numbers[:, :, 2:], operations, reverse
  )
  constants = draw_numbers(config, kinds, numbers[:, :, 0])
  values = np.zeros_like(kinds)
  for node in reversed(range(MAX_NODES)):
    column = np.s_[:, node : node + 1]
    operands[column], values[column] = arrange(
      kinds[column],
      constants[column],
      num_operands[column],
      operands[column],
      values,
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
  pending = np.arange(num)
  result, good = draw(0, pending)
  for attempt in itertools.count(1):
    pending = pending[~good]
    if not pending.size:
      break
    parts, good = draw(attempt, pending)
    for result_rows, part in zip(result, parts, strict=True):
      result_rows[pending] = part
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
      np.concatenate([x[:, None], y.reshape(num, -1, *x.shape[1:])], axis=1)
      for x, y in zip(graph, others, strict=True)
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
