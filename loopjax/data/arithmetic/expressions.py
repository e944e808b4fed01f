"""Random expressions in prefix notation, and their values.

An expression without operations is a number; any other is an operator and two
expressions that share the remaining operations, with uniform probability.
"""

import itertools

import numpy as np

from loopjax.data import pipeline

NUM_OPERATORS = 3  # Sum, difference and product.
_PARTS = 20  # Hash buckets of expressions, divided among the splits.
PARTS = {
  "train": np.arange(0, 16, dtype=np.uint64),
  "validation": np.arange(16, 18, dtype=np.uint64),
  "test": np.arange(18, 20, dtype=np.uint64),
}


def draw(
  modulus: int,
  max_operations: int,
  stream: int,
  positions: np.ndarray,
  operations: np.ndarray,
  split: str,
) -> np.ndarray:
  """Random expressions of a split; those of other splits are redrawn.

  Args:
    modulus: M; numbers are 0 .. M - 1.
    max_operations: maximum number of operations.
    stream: number of the random stream.
    positions: positions in the stream, int [B].
    operations: number of operations of each expression, from 1, int [B].
    split: "train", "validation" or "test".

  Returns:
    Tokens int64 [B, 2 max_operations + 1]: numbers are their own ids, operators
    start at M, and -1 fills the rest.
  """
  width = 2 * max_operations + 1
  tokens = np.full((len(positions), width), -1)
  wanted = np.arange(len(positions))
  for attempt in itertools.count():
    seed = pipeline.stream_seed(stream, attempt)
    numbers = pipeline.uniforms(seed, positions[wanted], 2 * width)
    drawn = _expressions(modulus, operations[wanted], numbers)
    tokens[wanted] = drawn
    outside = ~np.isin(_hash(drawn) % np.uint64(_PARTS), PARTS[split])
    wanted = wanted[outside]
    if not len(wanted):
      break
  return tokens


def distinct(tokens: np.ndarray) -> np.ndarray:
  """Positions of distinct expressions, in pseudorandom order."""
  _, first = np.unique(_hash(tokens), return_index=True)
  return first


def values(modulus: int, tokens: np.ndarray) -> np.ndarray:
  """The values of expressions, int64 [B], in 0 .. modulus - 1."""
  batch, width = tokens.shape
  rows = np.arange(batch)
  stack = np.zeros((batch, width + 2), np.int64)
  height = np.zeros(batch, np.int64)
  for token in tokens.T[::-1]:  # Operands are evaluated before their operator.
    left = stack[rows, height - 1]
    right = stack[rows, height - 2]
    results = np.stack([left + right, left - right, left * right])
    is_operator = token >= modulus
    kind = np.where(is_operator, token - modulus, 0)
    value = np.where(is_operator, results[kind, rows] % modulus, token)
    height += np.where(is_operator, -1, np.where(token >= 0, 1, 0))
    there = token >= 0
    stack[rows[there], height[there] - 1] = value[there]
  return stack[:, 0]


def _expressions(
  modulus: int, operations: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
  """Expressions from uniform numbers [B, 2 width], int64 [B, width]."""
  batch, width = len(operations), numbers.shape[1] // 2
  rows = np.arange(batch)
  # Stack of the sizes (in operations) of expressions yet to be written.
  stack = np.zeros((batch, width + 2), np.int64)
  stack[:, 0] = operations
  height = np.ones(batch, np.int64)
  tokens = np.full((batch, width), -1)
  for place in range(width):
    active = height > 0
    left_over = stack[rows, height - 1]
    which, share = numbers[:, 2 * place], numbers[:, 2 * place + 1]
    number = (which * modulus).astype(np.int64)
    operator = modulus + (which * NUM_OPERATORS).astype(np.int64)
    is_operator = active & (left_over > 0)
    token = np.where(is_operator, operator, number)
    tokens[:, place] = np.where(active, token, -1)
    left = (share * left_over).astype(np.int64)
    inner = rows[is_operator]
    at = height[is_operator]
    stack[inner, at - 1] = (left_over - 1 - left)[is_operator]
    stack[inner, at] = left[is_operator]
    height += np.where(is_operator, 1, np.where(active, -1, 0))
  return tokens


def _hash(tokens: np.ndarray) -> np.ndarray:
  """A hash of every row, uint64 [B]."""
  total = np.zeros(len(tokens), np.uint64)
  for column in tokens.T:
    total = pipeline.splitmix64(total ^ (column + 1).astype(np.uint64))
  return total
