"""The flags shared by commands that generate texts from prompts."""

import dataclasses
from typing import Any, NamedTuple

from loopjax import checks
from loopjax.errors import Parser, UserError
from loopjax.generate.sampling import Sampling
from loopjax.generate.source import ModelFlags

MAX_NEW_TOKENS = 256  # The default, or as many as fit.


class TextFlags(NamedTuple):
  """The flags of `add_flags`: how texts are generated, and where they end."""

  max_new_tokens: int | None
  samples: int
  stop: list[str]
  sampling: Sampling
  exit_threshold: float
  prefill_loops: int


def add_flags(parser: Parser) -> None:
  """Adds the flags of `TextFlags`, including those of `Sampling`."""
  parser.meant["--num_tokens"] = "--max_new_tokens"  # As in Python.
  parser.add_argument(
    "--max_new_tokens",
    type=int,
    help=f"maximum number of tokens to generate [{MAX_NEW_TOKENS}, or as many"
    " as fit]",
  )
  parser.add_argument(
    "--samples", type=int, default=1, help="number of texts per prompt [1]"
  )
  parser.add_argument(
    "--stop",
    action="append",
    default=[],
    help="a string that ends the text; may be repeated",
  )
  for field in dataclasses.fields(Sampling):
    parser.add_argument(
      f"--{field.name}",
      type=type(field.default),
      default=field.default,
      help=f"[{field.default}]",
    )
  parser.add_argument(
    "--exit_threshold",
    type=float,
    default=1.0,
    help="below 1, tokens exit the loop early [1.0]",
  )
  parser.add_argument(
    "--prefill_loops",
    type=int,
    default=0,
    help="number of loops for prefill; 0 for as many as in decoding [0]",
  )


def pop_flags(options: dict[str, Any]) -> TextFlags:
  """Removes the flags of `add_flags` from parsed options, and returns them.

  Raises:
    UserError: a value of `Sampling` is out of range.
  """
  names = [field.name for field in dataclasses.fields(Sampling)]
  options["sampling"] = Sampling(**{name: options.pop(name) for name in names})
  return TextFlags(**{name: options.pop(name) for name in TextFlags._fields})


def check(flags: TextFlags, model: ModelFlags) -> None:
  """Raises UserError for flags that are out of range or have no effect."""
  for text in flags.stop:
    checks.unicode("--stop", text)
  if "" in flags.stop:
    raise UserError("--stop= is empty; expected a string that ends the answer")
  for name, value, others in (
    ("exit_rule", model.exit_rule, ""),
    ("exit_kept", model.exit_kept, " or --prefill_loops"),
  ):
    has_effect = flags.exit_threshold < 1 or (others and flags.prefill_loops)
    if value not in (None, "fixed") and not has_effect:
      raise UserError(
        f"--{name}={value} has no effect without --exit_threshold below"
        f" 1{others}"
      )
  checks.flags_at_least(flags, samples=1)
