"""Expressions, their values, and the models' inputs."""

import collections
import functools
import itertools
import operator

import data_examples
import numpy as np

from loopjax.data.arithmetic import task

CONFIG = task.Config(modulus=11, max_operations=5, num_eval_examples=200)
OPERATORS = (operator.add, operator.sub, operator.mul)


joined = functools.partial(data_examples.joined, task, CONFIG)


def read(tokens):
  """(value, operations) of the first expression, which is removed."""
  token = tokens.pop(0)
  if token < CONFIG.modulus:
    return token, 0
  left, some = read(tokens)
  right, others = read(tokens)
  value = OPERATORS[token - CONFIG.modulus](left, right) % CONFIG.modulus
  return value, some + others + 1


def parsed(batch):
  """[(tokens, operations)] of rows, after checking their format."""
  found = []
  for row in range(len(batch["inputs"])):
    padding = batch["inputs"][row] == CONFIG.ask + 1
    assert padding[: padding.sum()].all()
    *tokens, last = batch["inputs"][row][~padding].tolist()
    assert last == CONFIG.ask
    rest = list(tokens)
    value, operations = read(rest)
    assert not rest
    assert batch["targets"][row].tolist() == [0] * 11 + [value]
    assert batch["weights"][row].tolist() == [0] * 11 + [1]
    found.append((tuple(tokens), operations))
  return found


def test_values_are_those_of_the_expressions_and_splits_are_disjoint():
  seen = {}
  for split, num in (("train", 60), ("validation", None), ("test", None)):
    batch = joined(split, num)
    found = parsed(batch)
    if split != "train":
      groups = np.array(CONFIG.eval_operations)[batch["group/operations"]]
      assert [operations for _, operations in found] == groups.tolist()
      found = [f for f, ok in zip(found, batch["valid"], strict=True) if ok]
      # Each once: with one operation, 50 draws repeat the few that exist.
      assert len({tokens for tokens, _ in found}) == len(found)
      sizes = collections.Counter(operations for _, operations in found)
      assert 10 < sizes[1] < 40 and sizes[5] == 50
    seen[split] = {tokens for tokens, _ in found}
  for one, other in itertools.combinations(seen.values(), 2):
    assert not one & other
  # Training contains nearly all expressions of one operation.
  assert len([tokens for tokens in seen["train"] if len(tokens) == 3]) > 100


def test_expressions_are_drawn_as_they_should():
  found = parsed(joined("train", 250))
  counts = collections.Counter(operations for _, operations in found)
  assert set(counts) == {1, 2, 3, 4, 5}
  assert min(counts.values()) > 700 and max(counts.values()) < 900
  numbers = collections.Counter(t for tokens, _ in found for t in tokens)
  digits = np.array([numbers[n] for n in range(11)])
  assert digits.std() < 0.05 * digits.mean()
  kinds = np.array([numbers[11 + n] for n in range(3)])
  assert kinds.std() < 0.05 * kinds.mean()
  # Of three operations, one is the root and the left subtree has 0, 1 or 2.
  left = collections.Counter()
  for tokens, operations in found:
    if operations == 3:
      left[read(list(tokens[1:]))[1]] += 1
  assert set(left) == {0, 1, 2} and min(left.values()) > 220


def test_a_difference_has_an_order():
  tokens = np.array(
    [[12, 3, 5, -1, -1], [11, 13, 2, 3, 9], [7, -1, -1, -1, -1]]
  )
  assert task.values_of(11, tokens).tolist() == [9, 4, 7]
