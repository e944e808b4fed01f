"""Windows of text to score, and batches of windows of similar length."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_SHORTEST = 16  # Minimum row length; limits the number of tiny programs.


class ScoringRequest(NamedTuple):
  """A continuation to score, given its context.

  Attributes:
    context: token ids, int [c], c >= 1.
    continuation: token ids, int [n].
  """

  context: np.ndarray
  continuation: np.ndarray


class ScoringWindow(NamedTuple):
  """A span of text whose last tokens are scored.

  Attributes:
    tokens: int [m + 1]: m inputs, then the target of the last input.
    num_scored: number of targets to score, 1 .. m.
  """

  tokens: np.ndarray
  num_scored: int


class WindowBatch(NamedTuple):
  """Windows that are scored together.

  Attributes:
    num_rows, length: shape of the arrays, which may be padded in both
      dimensions.
    members: indices of the windows.
  """

  num_rows: int
  length: int
  members: list[int]


def windows(request: ScoringRequest, max_length: int) -> list[ScoringWindow]:
  """Windows of at most `max_length` inputs that score every token once.

  Usually there is one, and contexts that do not fit are truncated from the
  left. A continuation longer than a window is scored half a window at a time,
  each half after as much preceding text as fits.
  """
  tokens = np.concatenate([request.context, request.continuation])
  first, num = len(request.context), len(request.continuation)
  assert first > 0, "the first token needs a context"
  assert num > 0, "nothing to score"
  stride = num if num <= max_length else max(1, max_length // 2)
  found = []
  for start in range(first, len(tokens), stride):
    stop = min(start + stride, len(tokens))
    low = max(0, stop - 1 - max_length)
    found.append(ScoringWindow(tokens[low:stop], stop - start))
  return found


def plan(
  lengths: Sequence[int], max_length: int, batch_tokens: int
) -> list[WindowBatch]:
  """Batches of windows of these lengths, longest first.

  Rows are padded to the next of four lengths per octave (1, 5/4, 6/4 and 7/4
  times a power of two). All batches of one length have the same number of rows,
  the smallest that keeps the number of batches minimal. One program is compiled
  per length.

  Args:
    lengths: window lengths, in tokens.
    max_length: maximum length of a row.
    batch_tokens: maximum tokens of a batch; a single row may exceed it.
  """
  buckets: dict[int, list[int]] = {}
  for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = min(rounded(lengths[number]), max_length)
    buckets.setdefault(length, []).append(number)
  batches = []
  for length, members in buckets.items():
    most = max(1, batch_tokens // length)
    num_batches = -(-len(members) // most)
    num_rows = -(-len(members) // num_batches)
    batches += [
      WindowBatch(num_rows, length, members[start : start + num_rows])
      for start in range(0, len(members), num_rows)
    ]
  return batches


def rounded(length: int) -> int:
  """The length rounded up to one of four lengths per octave, at least 16."""
  step = 1 << max(0, (length - 1).bit_length() - 3)
  return max(_SHORTEST, -(-length // step) * step)
