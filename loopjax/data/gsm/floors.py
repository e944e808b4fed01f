"""Floors: scores of heuristics that do not solve the problem."""

from collections.abc import Callable, Mapping

import numpy as np

from loopjax.data.gsm import language
from loopjax.data.gsm.config import Config

RULES = ("most_frequent", "lone_constant", "sum_of_constants")
_CHUNK = 128  # Examples in memory at once.


def exact_match(
  config: Config, make: Callable[[np.ndarray], Mapping[str, np.ndarray]]
) -> dict[str, float]:
  """Floors over all evaluation examples, not only this process's.

  Constants are the numbers that a quantity is said to equal, including given
  totals but not addends and factors.

  "most_frequent" gives the most common answer; "lone_constant" copies a random
  constant, or the only one (the floor is the expected score);
  "sum_of_constants" adds up all constants.

  Args:
    config: the task.
    make: function from indices of examples [b] to their batch.

  Returns:
    Exact match, 0 to 1, by "floor/<rule>/operations=<number>".
  """
  indices = np.arange(config.num_eval_examples)
  parts = [
    _answers_and_hits(make(indices[start : start + _CHUNK]))
    for start in range(0, len(indices), _CHUNK)
  ]
  groups, answers, *hits = (np.concatenate(x) for x in zip(*parts, strict=True))
  floors = {}
  for group, number in enumerate(config.eval_ops):
    of_group = groups == group
    values = (
      np.bincount(answers[of_group]).max() / of_group.sum(),
      *(hit[of_group].mean() for hit in hits),
    )
    for name, value in zip(RULES, values, strict=True):
      floors[f"floor/{name}/operations={number}"] = float(value)
  return floors


def _answers_and_hits(
  batch: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, ...]:
  """Groups and answers int [b]; scores of the last two rules, f64 [b]."""
  inputs = batch["inputs"]
  answers = numbers_after(inputs, language.ANSWER).max(axis=1)
  constants = numbers_after(inputs, language.word("equal"))
  right = (constants == answers[:, None]).sum(axis=1)
  copied = right / (constants > 0).sum(axis=1)
  added = (constants.sum(axis=1) == answers).astype(np.float64)
  return batch["group/operations"], answers, copied, added


def numbers_after(tokens: np.ndarray, before: int) -> np.ndarray:
  """Numbers that directly follow a token.

  Args:
    tokens: ids, int [B, T].
    before: id of the token.

  Returns:
    int64 [B, T]: at the position of the token, the number after it; 0 if there
    is none.
  """
  values = np.zeros(tokens.shape, np.int64)
  goes_on = tokens == before
  for place in range(1, language.NUM_DIGITS + 1):
    digits = np.full_like(tokens, language.PADDING)
    digits[:, :-place] = tokens[:, place:]
    goes_on &= digits < 10
    values = np.where(goes_on, 10 * values + digits, values)
  return values
