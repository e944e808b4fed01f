"""Series over training steps, from the rows of metrics.jsonl."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Rows = list[dict[str, Any]]


def scalar(rows: Rows, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps and values of one metric, [N] each, in the rows that have it."""
  points = [
    (row["step"], row[name])
    for row in rows
    if row["split"] == split and name in row
  ]
  steps, values = zip(*points, strict=True) if points else ((), ())
  return np.asarray(steps, int), np.asarray(values, float)


def by_loop(rows: Rows, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N] and values [N, K] of a metric with one value per loop."""
  return _numbered(rows, split, f"{name}/loop=")


def by_layer(
  rows: Rows, split: str, name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N] and values [N, L] of a metric with one value per layer."""
  return _numbered(rows, split, f"{name}/layer=")


def together(
  first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """The values of two series (steps, values) at the steps that both have."""
  (at, values), (other_at, others) = first, second
  return values[np.isin(at, other_at)], others[np.isin(other_at, at)]


def by_depth(
  metrics: Mapping[str, float], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of loops, from 1, and a final score of the output after each."""
  prefix = f"{name}/loop="
  points = sorted(
    (int(key.removeprefix(prefix)) + 1, value)
    for key, value in metrics.items()
    if key.startswith(prefix)
  )
  loops, values = zip(*points, strict=True) if points else ((), ())
  return np.asarray(loops, int), np.asarray(values, float)


def _numbered(
  rows: Rows, split: str, prefix: str
) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N] and values [N, K] of the metrics prefix0, prefix1, ..."""
  pattern = re.compile(re.escape(prefix) + r"\d+")
  rows = [row for row in rows if row["split"] == split]
  keys = {key for row in rows for key in row if pattern.fullmatch(key)}
  ordered = [f"{prefix}{number}" for number in range(len(keys))]
  complete = [
    row for row in rows if keys and all(key in row for key in ordered)
  ]
  steps = np.asarray([row["step"] for row in complete], int)
  values = [[row[key] for key in ordered] for row in complete]
  return steps, np.asarray(values, float).reshape(len(steps), len(ordered))


def lower_is_better(name: str) -> bool:
  """Whether a score, after its split and "/", is a loss."""
  return name.rpartition("/")[2] in ("loss", "bits_per_byte")
