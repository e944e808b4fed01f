"""Scores of the answers: pass@k, lengths, and the table of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopjax.commands import text_table
from loopjax.eval import bits_per_byte
from loopjax.eval.answers import pass_at_k


def metrics_of(
  rows: Sequence[dict[str, Any]], num_samples: int, ks: Sequence[int]
) -> dict[str, float]:
  """Means over questions, their standard errors, and the number of questions.

  "NAME/standard_error" is over questions, "NAME/standard_error_of_samples" over
  other samples of the same questions. "ended" is the share of answers that were
  not cut at their maximum length; "loops" is a mean over tokens.
  """

  def column(name: str) -> np.ndarray:
    values = np.array([row[name] for row in rows])
    return values.reshape(-1, num_samples)

  right, num_tokens = column("right"), column("num_tokens")
  ended, num_loops = column("finish") == "stop", column("num_loops")
  ones, lengths = np.ones(len(right)), num_tokens.sum(axis=1)
  values = bits_per_byte.Values
  metrics = bits_per_byte.summarise(
    {f"pass@{k}": values(pass_at_k.of_questions(right, k), ones) for k in ks}
    | {
      "tokens": values(num_tokens.mean(axis=1), ones),
      "ended": values(ended.mean(axis=1), ones),
      "loops": values(num_loops.sum(axis=1) / lengths, lengths),
    }
  )
  for k in ks:
    error = pass_at_k.error_of_samples(right, k)
    if error is not None:
      metrics[f"pass@{k}/standard_error_of_samples"] = error
  return metrics


def table(
  metrics: dict[str, float], num_samples: int, ks: Sequence[int]
) -> str:
  """The scores and their standard errors as aligned text."""
  lines = [("", "mean", "± questions", "± samples")]
  for name in (*(f"pass@{k}" for k in ks), "tokens", "ended", "loops"):
    of_samples = metrics.get(f"{name}/standard_error_of_samples")
    lines.append(
      (
        name,
        f"{metrics[name]:.4g}",
        f"{metrics[f'{name}/standard_error']:.2g}",
        "" if of_samples is None else f"{of_samples:.2g}",
      )
    )
  header = f"{metrics['n']} questions, {num_samples} answers each"
  return f"{header}\n{text_table.aligned(lines, num_left=1)}"
