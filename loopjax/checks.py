"""Checks that the records of a config share."""

from collections.abc import Iterable
from typing import Any

from loopjax.errors import UserError


def one_of(section: str, record: Any, **allowed: Iterable[str]) -> None:
  """Raises UserError unless each named field is among its allowed values."""
  for field, values in allowed.items():
    if getattr(record, field) not in values:
      raise UserError(
        f"{section}.{field}={getattr(record, field)!r} is none of"
        f" {', '.join(values)}"
      )


def at_least(section: str, record: Any, **bounds: float) -> None:
  """Raises UserError unless each named field is at least its bound."""
  for field, bound in bounds.items():
    if not getattr(record, field) >= bound:
      raise UserError(
        f"{section}.{field}={getattr(record, field)} must be at least {bound}"
      )
