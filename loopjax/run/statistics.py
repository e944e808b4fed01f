"""Means over examples, their errors, and differences of two runs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_SUBSETS = 10_000
_SUBSETS_AT_A_TIME, _ITEMS_AT_A_TIME = 1000, 4096  # 33 MB in float64.
_OUTSIDE = 0.05


def mean(
  sums: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The weighted mean of rows, and its standard error, f64 [...] each.

  Rows are independent, but the tokens of a row are not, so that the mean m is
  a ratio of sums over rows. The square of its error is n / (n - 1) times sum_i
  (s_i - m w_i)^2 / (sum_i w_i)^2 over the n rows that have weight; for equal
  weights this is the sample variance over n (Cochran, "Sampling Techniques",
  section 2.11).

  Args:
    sums: each row's sum of weight times value, s, [..., N].
    weights: each row's sum of weights, w, [..., N].

  Returns:
    (mean, standard error); the mean is NaN without weight, the error with
    fewer than two rows that have weight.
  """
  sums, weights = (np.asarray(x, np.float64) for x in (sums, weights))
  total = weights.sum(axis=-1)
  total = np.where(total > 0, total, np.nan)
  means = sums.sum(axis=-1) / total
  off = sums - means[..., None] * weights
  num = np.count_nonzero(weights, axis=-1)
  per_degree = np.where(num > 1, num / np.maximum(num - 1, 1), np.nan)
  return means, np.sqrt(per_degree * (off**2).sum(axis=-1)) / total


class Difference(NamedTuple):
  """The difference of two runs' scores.

  Attributes:
    value: ours - the reference's.
    low, high: its 95 % interval; None for fewer than six items, of which 95 %
      of the gaps would be all.
    p: the probability of a difference at least as far from zero without a real
      one, two-sided and never 0; None for fewer than six items.
  """

  value: float
  low: float | None = None
  high: float | None = None
  p: float | None = None

  def cells(self) -> tuple[str, str, str]:
    """The difference, its interval and p as text."""
    value = f"{self.value:+.4f}"
    if self.p is None:
      return value, "too few items", ""
    return value, f"[{self.low:+.4f}, {self.high:+.4f}]", f"{self.p:.4f}"


def compare(
  scores: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> dict[str, Difference]:
  """Differences of weighted means over the same items, by score.

  If neither run were better, the difference of an item would be as likely to be
  of either sign. Then of all 2^n - 1 non-empty subsets of n items, the means
  leave 2^n gaps, each of which has the real difference with equal probability
  (Hartigan, "Using subsample values as typical values", 1969). This gives an
  interval and a test that are exact for any number of items; for items that are
  right or wrong it is the sign test. Above 13 items, 10,000 random subsets
  stand for all, the same for all scores.

  Args:
    scores: (ours, reference, weights) of n items, [n] each. Items without
      weight do not count.
  """
  found: dict[str, Difference] = {}
  many: dict[str, np.ndarray] = {}
  for name, (ours, reference, weights) in scores.items():
    weights = np.asarray(weights, np.float64)
    counted = weights > 0
    values, others = (
      np.where(counted, x, 0).astype(np.float64) for x in (ours, reference)
    )
    terms = np.stack([weights * (values - others), weights], axis=1)
    if 2 ** int(np.count_nonzero(counted)) <= _SUBSETS:
      found[name] = _difference(terms, _sums_of_all(terms[counted]))
    else:
      many[name] = terms
  sums = _sums_of_random([*many.values()])
  for (name, terms), some in zip(many.items(), sums, strict=True):
    found[name] = _difference(terms, some)
  return {name: found[name] for name in scores}


def _difference(terms: np.ndarray, sums: np.ndarray) -> Difference:
  """A difference.

  Args:
    terms: weight times difference, and weight of each item, [n, 2].
    sums: of subsets of them, [_, 2].
  """
  total, weight = terms.sum(axis=0)
  value = float(total / weight)
  sums = sums[sums[:, 1] > 0]
  means = np.sort(sums[:, 0] / sums[:, 1])
  num_gaps = len(means) + 1
  num_outside = int(_OUTSIDE / 2 * num_gaps)  # At each end.
  if not num_outside:
    return Difference(value)
  opposite = 1 + min(np.sum(means <= 0), np.sum(means >= 0))
  return Difference(
    value,
    low=float(means[num_outside - 1]),
    high=float(means[-num_outside]),
    p=min(1.0, 2 * float(opposite) / num_gaps),
  )


def _sums_of_all(terms: np.ndarray) -> np.ndarray:
  """Sums of all subsets of terms [n, 2] that are not empty."""
  num = len(terms)
  return (np.arange(1, 2**num)[:, None] >> np.arange(num) & 1) @ terms


def _sums_of_random(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Sums of the same random subsets of each score's terms [n, 2]."""
  if not scores:
    return []
  terms = np.concatenate(scores, axis=1)
  sums = np.zeros((_SUBSETS, terms.shape[1]))
  generator = np.random.default_rng(0)
  for first in range(0, len(terms), _ITEMS_AT_A_TIME):
    here = terms[first : first + _ITEMS_AT_A_TIME]
    for start in range(0, _SUBSETS, _SUBSETS_AT_A_TIME):
      drawn = generator.bytes(_SUBSETS_AT_A_TIME * _ITEMS_AT_A_TIME // 8)
      bits = np.unpackbits(np.frombuffer(drawn, np.uint8))
      subsets = bits.reshape(_SUBSETS_AT_A_TIME, -1)[:, : len(here)]
      sums[start : start + _SUBSETS_AT_A_TIME] += subsets @ here
  return np.split(sums, len(scores), axis=1)
