"""Scores of several sampled answers per question: pass@k and its errors."""

import math

import numpy as np


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
  """The probability that at least one of k samples is right.

  The unbiased estimate from n samples, of which c are right: 1 - C(n - c, k) /
  C(n, k) (arXiv 2107.03374, equation 1).

  Args:
    num_samples: n.
    num_right: c, in [0, n].
    k: in [1, n].
  """
  assert 1 <= k <= num_samples and 0 <= num_right <= num_samples
  wrong = num_samples - num_right
  return 1 - math.comb(wrong, k) / math.comb(num_samples, k)


def of_questions(right: np.ndarray, k: int) -> np.ndarray:
  """pass@k of each question, f64 [Q].

  Args:
    right: whether each sample is right, bool [Q, n].
    k: in [1, n].
  """
  num = right.shape[1]
  return np.array([pass_at_k(num, int(c), k) for c in right.sum(axis=1)])


def error_of_samples(right: np.ndarray, k: int) -> float | None:
  """The standard error of the mean pass@k over samples of the same questions.

  By the jackknife over samples: the variance of a question's estimate is (n -
  1) / n times the sum of squared deviations of the n estimates without one of
  the samples, which for k = 1 is c/n (1 - c/n) / (n - 1). The error over
  questions, for other questions of the same kind, is larger.

  Args:
    right: whether each sample is right, bool [Q, n].
    k: in [1, n].

  Returns:
    The standard error; None for k = n, where no sample can be omitted.
  """
  num_questions, num = right.shape
  if k == num:
    return None
  variance = 0.0
  for c in right.sum(axis=1).tolist():
    mean = pass_at_k(num, c, k)
    without_right = pass_at_k(num - 1, c - 1, k) if c else mean
    without_wrong = pass_at_k(num - 1, c, k) if c < num else mean
    squares = c * (without_right - mean) ** 2
    squares += (num - c) * (without_wrong - mean) ** 2
    variance += (num - 1) / num * squares
  return math.sqrt(variance) / num_questions
