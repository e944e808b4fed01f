"""Rows of analysis.jsonl, the common format of all analyses."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from loopjax.run import statistics
from loopjax.run import workdir as workdir_lib

Row = dict[str, Any]


def make(
  analysis: str,
  split: str,
  loop: int,
  position: int,
  samples: Mapping[str, np.ndarray],
  **labels: str | float,
) -> Row:
  """A row of means and standard errors.

  Args:
    loop: the loop after which the state is read, from 1.
    position: position in the question, from 0.
    samples: values of n > 0 questions by metric, [n].
    labels: further entries that identify the row.

  Returns:
    The labels, "count" n, and for every metric its mean and
    "<metric>/standard_error".
  """
  values: dict[str, Any] = {}
  for name, sample in samples.items():
    mean, error = statistics.mean(sample, np.ones(len(sample)))
    values |= {name: mean, f"{name}/standard_error": error}
  count = len(next(iter(samples.values())))
  return {
    "analysis": analysis,
    "split": split,
    **labels,
    "loop": loop,
    "position": position,
    "count": count,
    **workdir_lib.finite(values),
  }


def select(rows: Iterable[Row], analysis: str, **labels: Any) -> list[Row]:
  """The rows of an analysis that have all these labels."""
  conditions = {"analysis": analysis, **labels}
  return [
    row
    for row in rows
    if all(row.get(name) == value for name, value in conditions.items())
  ]


def values_of(rows: Iterable[Row], label: str) -> list[Any]:
  """Distinct values of a label, in order of occurrence."""
  return list(dict.fromkeys(row[label] for row in rows))
