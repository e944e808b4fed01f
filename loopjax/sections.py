"""A config as sections of uninterpreted settings."""

import re
from collections.abc import Mapping
from typing import Any

_OUTER_COMMA = re.compile(r",(?![^(]*\))")  # Not within a tuple.


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
  """{"section": {"key": value}} -> {"section.key": value}."""
  return {
    f"{section}.{key}": value
    for section, entries in config.items()
    for key, value in entries.items()
  }


def flags(overrides: Mapping[str, Any]) -> list[str]:
  """{"section.key": value} as flags of a command; a list of JSON is a tuple."""
  return [
    f"--config.{key}={tuple(value) if isinstance(value, list) else value}"
    for key, value in overrides.items()
  ]


def split(argument: str) -> list[str]:
  """The comma-separated parts of the argument of --config=FILE:argument."""
  return [part for part in _OUTER_COMMA.split(argument) if part]
