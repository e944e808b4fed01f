"""Numbers, durations and mappings as a report writes them."""

from collections.abc import Iterable, Mapping
from typing import Any

_MAX_VALUES = 6  # Values shown of one fact about the scale.


def number(value: float, digits: int) -> str:
  """A number as text, with commas between thousands."""
  return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
  """A duration in a convenient unit."""
  if seconds < 120:
    return f"{seconds:.0f}\u00a0s"
  if seconds < 7200:
    return f"{seconds / 60:.0f}\u00a0min"
  return f"{seconds / 3600:.1f}\u00a0h"


def distinct(values: Iterable[Any]) -> str:
  """Different values, at most _MAX_VALUES of them; None is left out."""
  known = dict.fromkeys(v for v in values if v is not None)
  texts = [
    score(v, None) if isinstance(v, (int, float)) else str(v) for v in known
  ]
  more = [f"and {len(texts) - _MAX_VALUES} more"]
  shown = texts[:_MAX_VALUES] + (more if len(texts) > _MAX_VALUES else [])
  return ", ".join(shown) or "–"


def pairs(mapping: Mapping[str, Any]) -> str:
  """Keys and values in a line."""
  return " ".join(f"{key} {value}" for key, value in mapping.items())


def score(value: float, standard_error: float | None) -> str:
  """A score with four digits, and its standard error if it has one."""
  text = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
  return f"{text} ± {standard_error:.2g}" if standard_error else text
