"""The JSON fields of a request body, checked one by one.

They follow OpenAI's completions and chat completions. `num_loops`,
`exit_threshold`, `prefill_loops`, `top_k`, `min_p`,
`repetition_penalty`, `add_generation_prompt` and `continue_final_message` are
extensions. A field that would have no effect here is rejected, never silently
ignored.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from loopjax.errors import UserError, one_line
from loopjax.serve.errors import ClientError

_COMMON = (
  "model", "stream", "stream_options", "max_tokens", "temperature", "top_p",
  "top_k", "min_p", "repetition_penalty", "n", "stop", "seed", "logprobs",
  "num_loops", "exit_threshold", "prefill_loops",
)  # fmt: skip
_COMPLETION = {*_COMMON, "prompt", "echo"}
_CHAT = {
  *_COMMON, "messages", "max_completion_tokens", "top_logprobs",
  "add_generation_prompt", "continue_final_message",
}  # fmt: skip
# Fields that cannot change the answer.
_IGNORED = {
  "user", "metadata", "store", "service_tier", "safety_identifier",
  "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
# OpenAI's other fields, each with the values that have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "best_of": (1,),
  "echo": (False,),
  "suffix": ("",),
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
  "response_format": ({"type": "text"},),
  "tools": ([],),
  "tool_choice": ("none", "auto"),
  "parallel_tool_calls": (True, False),
  "modalities": (["text"],),
  "reasoning_effort": ("none", "minimal", "low", "medium", "high"),
  "verbosity": ("medium",),
}


# The engine's names of fields.
_FIELDS = {
  "max_new_tokens": "max_tokens", "top_log_probabilities": "logprobs",
}  # fmt: skip


def parse(body: bytes, *, chat: bool) -> dict[str, Any]:
  """The fields of a body that are not null.

  Args:
    body: the body of a request.
    chat: whether it is a request for chat completions.

  Raises:
    ClientError: the body is not a JSON object, or a field is unknown, has a
      value that is not supported.
  """
  try:
    fields = json.loads(body, parse_constant=_reject_constant)
  except (ValueError, RecursionError) as error:
    raise ClientError(
      f"the body is not valid JSON: {one_line(error, 100)}"
    ) from error
  if not isinstance(fields, dict):
    raise ClientError("the body is not a JSON object")
  fields = {name: x for name, x in fields.items() if x is not None}
  for name, value in fields.items():
    if name in (_CHAT if chat else _COMPLETION) or name in _IGNORED:
      continue
    if name not in _NEUTRAL:
      # The answer cannot hold a lone surrogate, which JSON strings can.
      shown = name[:64].encode(errors="backslashreplace").decode()
      raise ClientError(f"unknown field {abbreviate(name)}", param=shown)
    if value not in _NEUTRAL[name]:
      raise ClientError(
        f"{name}={abbreviate(value)} is unsupported",
        param=name,
        code="unsupported",
      )
  return fields


def _reject_constant(name: str) -> float:
  """Raises ValueError for NaN and infinities, which are not JSON."""
  raise ValueError(f"{name} is not a number")


def text(fields: Mapping[str, Any], name: str, default: str) -> str:
  """A string field; ClientError if it is something else."""
  value = fields.get(name, default)
  if not isinstance(value, str):
    raise invalid(fields, name, "a string")
  return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
  """A boolean field, False by default; ClientError if it is something else."""
  value = fields.get(name, False)
  if not isinstance(value, bool):
    raise invalid(fields, name, "true or false")
  return value


def integer(
  fields: Mapping[str, Any], name: str, default: int, low: int, high: int
) -> int:
  """An integer field; ClientError unless it is in [low, high].

  The default is not checked.
  """
  if name not in fields:
    return default
  value = fields[name]
  if type(value) is not int or not low <= value <= high:
    raise invalid(fields, name, f"an integer from {low} to {high}")
  return value


def number(
  fields: Mapping[str, Any], name: str, default: float, low: int, high: int
) -> float:
  """A numeric field; ClientError unless it is in [low, high]."""
  value = fields.get(name, default)
  if (
    isinstance(value, bool)
    or not isinstance(value, int | float)
    or not low <= value <= high
  ):
    raise invalid(fields, name, f"a number from {low} to {high}")
  return float(value)


def invalid(fields: Mapping[str, Any], name: str, expected: str) -> ClientError:
  """The error for a field that is missing or is not what was expected."""
  if name not in fields:
    return ClientError(f"{name} is missing; expected {expected}", param=name)
  return ClientError(
    f"{name}={abbreviate(fields[name])} is not {expected}", param=name
  )


def refused(error: UserError) -> ClientError:
  """The error for a value that the engine refuses, with the field's name."""
  name = re.match(r"\w+(?==)", str(error))
  found = name and _FIELDS.get(name[0], name[0])
  is_prompt = str(error).startswith("the prompt ")
  return ClientError(str(error), param="prompt" if is_prompt else found)


def abbreviate(value: Any) -> str:
  """A value for an error message, at most 80 characters."""
  return reprlib.repr(value)[:80]
