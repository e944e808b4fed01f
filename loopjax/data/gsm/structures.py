"""Structure of problems: quantities and their operands, without values.

A graph is drawn backwards from its final quantity, which then depends on all
others with an exact number of operations. An operation is an edge into a
quantity: every operand, every item that a total counts, and every constant is
one (the count of GSM-Infinite, arXiv 2502.05252).
"""

import itertools

import numpy as np

from loopjax.data.gsm.config import MAX_OPERATIONS
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


def draw(
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
  rest, created = operations, np.ones(len(numbers), np.int64)
  role = np.where(reverse, _TOTAL, _ANY)
  for node in range(MAX_NODES):
    others = np.maximum(created - node - 1, 0)
    cumulative = _CUMULATIVE[role, others, rest]
    option = (numbers[:, node, :1] >= cumulative).sum(axis=1)
    kind, num, shared = _OPTIONS[option].T
    may_share = (nodes > node) & (nodes < created[:, None])
    keys = np.where(may_share, numbers[:, node, 1:], 1.0)
    old = np.argsort(keys, axis=1, kind="stable")[:, :MAX_OPERANDS]
    new = created[:, None] + slots - shared[:, None]
    taken = slots < num[:, None]
    chosen = np.where(slots < shared[:, None], old, new) * taken
    for slot in slots:
      counted = taken[:, slot] & (kind == TOTAL)
      counted_by[rows[counted], chosen[counted, slot]] = node
    kinds[:, node], num_operands[:, node], operands[:, node] = kind, num, chosen
    created = created + num - shared
    rest = rest - num - np.isin(kind, WITH_NUMBER)
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
  for role, others, rest in itertools.product(
    *map(range, probabilities.shape[:3])
  ):
    waiting, after = others + nums - shared, rest - costs
    fits = (kinds != ABSENT) & (shared <= others)
    fits &= (after >= waiting) & ((waiting > 0) | (after == 0))
    if role != _ANY:
      fits &= (kinds == TOTAL) == (role == _TOTAL)
    for kind in _NUM_OPERANDS:
      options = fits & (kinds == kind)
      probabilities[role, others, rest] += options / max(options.sum(), 1)
  sums = np.cumsum(probabilities, axis=-1)
  return sums / np.where(sums[..., -1:] > 0, sums[..., -1:], 1)


_CUMULATIVE = _cumulative_probabilities()
