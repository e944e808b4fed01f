"""Scores of sampled answers: pass@k with standard errors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loopjax.commands import document
from loopjax.eval import bits_per_byte


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
  """The probability that at least one of k samples is correct.

  The unbiased estimate from n samples, of which c are correct: 1 - C(n - c, k)
  / C(n, k) (arXiv 2107.03374, equation 1).

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
    right: whether each sample is correct, bool [Q, n].
    k: in [1, n].
  """
  num = right.shape[1]
  return np.array([pass_at_k(num, int(c), k) for c in right.sum(axis=1)])


def error_of_samples(right: np.ndarray, k: int) -> float | None:
  """The standard error of the mean pass@k over samples of the same questions.

  By the jackknife over samples: the variance of a question's estimate is (n -
  1) / n times the sum of squared deviations of the n estimates without one of
  the samples, which for k = 1 is c/n (1 - c/n) / (n - 1). The error over
  questions, which covers other questions of the same kind, is larger.

  Args:
    right: whether each sample is correct, bool [Q, n].
    k: in [1, n].

  Returns:
    The standard error; None for k = n, for which no sample can be omitted.
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


def metrics_of(
  rows: Sequence[dict[str, Any]], num_samples: int, ks: Sequence[int]
) -> dict[str, float]:
  """Means over questions, their standard errors, and the number of questions.

  "NAME/standard_error" is over questions, "NAME/standard_error_of_samples" over
  other samples of the same questions. "ended" is the fraction of answers not
  truncated at the maximum length; "loops" is a mean over tokens.
  """

  def column(name: str) -> np.ndarray:
    values = np.array([row[name] for row in rows])
    return values.reshape(-1, num_samples)

  right, num_tokens = column("right"), column("num_tokens")
  ended, num_loops = column("finish") == "stop", column("num_loops")
  ones, lengths = np.ones(len(right)), num_tokens.sum(axis=1)
  values = bits_per_byte.Values
  metrics = bits_per_byte.summarise(
    {f"pass@{k}": values(of_questions(right, k), ones) for k in ks}
    | {
      "tokens": values(num_tokens.mean(axis=1), ones),
      "ended": values(ended.mean(axis=1), ones),
      "loops": values(num_loops.sum(axis=1) / lengths, lengths),
    }
  )
  for k in ks:
    error = error_of_samples(right, k)
    if error is not None:
      metrics[f"pass@{k}/standard_error_of_samples"] = error
  return metrics


def table(
  metrics: dict[str, float], num_samples: int, ks: Sequence[int]
) -> str:
  """The scores and their standard errors as aligned text."""
  lines = [("", "mean", "± questions", "± samples")]
  for name in (*(f"pass@{k}" for k in ks), "tokens", "ended", "loops"):
    of_questions, of_samples = (
      f"{metrics[key]:.2g}" if (key := f"{name}/{error}") in metrics else ""
      for error in ("standard_error", "standard_error_of_samples")
    )
    lines.append((name, f"{metrics[name]:.4g}", of_questions, of_samples))
  header = f"{metrics['n']} questions, {num_samples} answers each"
  return f"{header}\n{document.aligned(lines, num_left=1)}"
