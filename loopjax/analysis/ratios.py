"""Means over rows, and their standard errors."""

import numpy as np


def mean(
  sums: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The weighted mean of rows, and its standard error, f64 [...] each.

  The error is of a ratio of sums, as in evaluations: rows are independent, but
  the tokens of a row are not.

  Args:
    sums: each row's sum of weight times value, [..., N].
    weights: each row's sum of weights, [..., N].

  Returns:
    (mean, standard error); NaN without weight.
  """
  sums, weights = (np.asarray(x, np.float64) for x in (sums, weights))
  total = weights.sum(axis=-1)
  total = np.where(total > 0, total, np.nan)
  means = sums.sum(axis=-1) / total
  off = sums - means[..., None] * weights
  return means, np.sqrt((off**2).sum(axis=-1)) / total
