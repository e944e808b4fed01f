"""A config as sections of uninterpreted settings."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.errors import UserError, nearest

_OUTER_COMMA = re.compile(r",(?![^(]*\))")  # Not within a tuple.


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
  """{"section": {"key": value}} -> {"section.key": value}."""
  return {
    f"{section}.{key}": value
    for section, entries in config.items()
    for key, value in entries.items()
  }


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """The keys that some mappings lack or have another value of, in order."""
  return [
    key
    for key in dict.fromkeys(key for one in settings for key in one)
    if any(key not in x or x[key] != settings[0].get(key) for x in settings)
  ]


def flags(overrides: Mapping[str, Any]) -> list[str]:
  """{"section.key": value} as flags of a command; a list of JSON is a tuple."""
  return [
    f"--config.{key}={tuple(value) if isinstance(value, list) else value}"
    for key, value in overrides.items()
  ]


def split_name(config_name: str) -> tuple[str, str]:
  """(file, argument) of --config=FILE[:argument].

  Folders may have a colon in their names, and an argument a file `.py`.
  """
  path, _, argument = config_name.partition(":")
  match = re.match(r"(.*?\.py)(?::(.*))?$", config_name, re.DOTALL)
  if match and "/" in path and not path.endswith(".py"):
    return match[1], match[2] or ""
  return path, argument


def split(argument: str) -> list[str]:
  """The comma-separated parts of the argument of --config=FILE:argument."""
  return [part for part in _OUTER_COMMA.split(argument) if part]


def check_key(key: str, known: Mapping[str, Any]) -> None:
  """Raises UserError for an unknown setting, and suggests similar names."""
  if key in known:
    return
  section = f"{key.partition('.')[0]}."
  word = key.rpartition(".")[2]
  same = [name for name in known if word in _short_names(name)]
  same.sort(key=lambda name: not name.startswith(section))
  # A section in common makes no two names alike.
  near = [
    name
    for name in nearest(key, known)
    if nearest(word, [name.rpartition(".")[2]])
  ]
  near = [*same, *near]
  if near:
    suggestions = ", ".join(list(dict.fromkeys(near))[:3])
    raise UserError(f"unknown setting {key!r}; did you mean {suggestions}?")
  names = [name for name in known if name.startswith(section)]
  names = names or sorted({name.partition(".")[0] for name in known})
  raise UserError(
    f"unknown setting {key!r}; expected one of {', '.join(names)}"
  )


def _short_names(name: str) -> tuple[str, str, str]:
  """("learning_rate", "lr", "rate") of "optim.learning_rate"."""
  last = name.rpartition(".")[2]
  initials = "".join(word[:1] for word in last.split("_"))
  return last, initials, last.partition("_")[2]
