"""Validates request bodies and converts them to `Ask`.

The fields are those of OpenAI's completions and chat completions. `loops`,
`exit`, `top_k`, `min_p` and `repetition_penalty` are extensions. A field that
would have no effect here is rejected, never silently ignored.
"""

import json
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError, one_line
from loopjax.generate import source
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling

MAX_CHOICES = 128  # Choices of a request, over all its prompts.
_SHARED = (
  "model", "stream", "stream_options", "max_tokens", "temperature", "top_p",
  "top_k", "min_p", "repetition_penalty", "n", "stop", "seed", "logprobs",
  "loops", "exit",
)  # fmt: skip
_FIELDS = {
  False: {*_SHARED, "prompt"},
  True: {*_SHARED, "messages", "max_completion_tokens", "top_logprobs"},
}
# Fields that cannot change the answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier"}
# OpenAI's other fields, each with the values that ask for nothing special.
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
}


class ClientError(Exception):
  """A rejected request, with its error in OpenAI's format.

  Attributes:
    status: the HTTP status.
    content: the body of the response, to be written as JSON.
    headers: additional headers of the response.
  """

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.headers = status, dict(headers or {})
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
      status, "invalid_request_error" if status < 500 else "server_error"
    )
    self.content = {
      "error": {"message": message, "type": kind, "param": param, "code": code}
    }


class Ask(NamedTuple):
  """A validated request.

  Attributes:
    requests: the engine's requests, one per choice; those of a prompt are
      consecutive.
    num_prompt_tokens: tokens of all prompts.
    stops: strings that end a choice.
    stream: whether tokens are sent as they are sampled.
    include_usage: whether the last chunk of a stream reports token counts.
    log_probabilities: whether the log-probabilities of tokens are reported.
  """

  requests: tuple[GenerationRequest, ...]
  num_prompt_tokens: int
  stops: tuple[str, ...]
  stream: bool
  include_usage: bool
  log_probabilities: bool


class Reader(NamedTuple):
  """The model's settings that are needed to read requests.

  Attributes:
    name: the model's name in the API.
    tokenizer: the model's tokenizer.
    max_tokens: tokens of a prompt and its completion; None for no limit.
    limit: maximum number of sampled tokens of a choice.
    chat: function from messages to a prompt's text; None if the model has no
      chat template.
  """

  name: str
  tokenizer: Tokenizer
  max_tokens: int | None
  limit: int
  chat: Callable[[Sequence[Mapping[str, str]]], str] | None


def read(body: bytes, reader: Reader, *, chat: bool) -> Ask:
  """Validates the body of a request.

  Raises:
    ClientError: a field is missing, unknown or invalid.
  """
  fields = _fields(body, chat)
  name = _text(fields, "model", reader.name)
  if name != reader.name:
    raise ClientError(
      f"there is no model {_short(name)}; this server has {reader.name!r}",
      status=404,
      param="model",
      code="model_not_found",
    )
  prompts = _messages(fields, reader) if chat else _prompts(fields, reader)
  n = _integer(fields, "n", 1, 1, MAX_CHOICES)
  if n * len(prompts) > MAX_CHOICES:
    raise ClientError(
      f"{n * len(prompts)} choices are more than {MAX_CHOICES}", param="n"
    )
  shown, num_top = _log_probabilities(fields, chat)
  seed = _integer(fields, "seed", secrets.randbits(31), 0, 2**31 - 1)
  given: dict[str, Any] = {
    "temperature": _number(fields, "temperature", 1.0, 0, 2),
    "top_p": _number(fields, "top_p", 1.0, 0, 1),
    "top_k": _integer(fields, "top_k", 0, 0, 2**31 - 1),
    "min_p": _number(fields, "min_p", 0.0, 0, 1),
    "repetition_penalty": _number(fields, "repetition_penalty", 1.0, 0, 100),
  }
  options = fields.get("stream_options", {})
  if not isinstance(options, dict) or options.keys() - {"include_usage"}:
    raise _wrong(fields, "stream_options", "an object with include_usage")
  try:
    requests = tuple(
      GenerationRequest(
        prompt=prompt,
        max_new_tokens=_max_tokens(fields, reader, len(prompt), chat),
        # Each choice has its own seed; the first has the request's.
        sampling=Sampling(**given, seed=seed + choice),
        stop_tokens=(reader.tokenizer.end,),
        top_log_probabilities=num_top,
        num_loops=_integer(fields, "loops", 0, 1, 2**31 - 1),
        exit_threshold=_number(fields, "exit", 1.0, 0, 1),
      )
      for prompt in prompts
      for choice in range(n)
    )
  except UserError as error:
    raise ClientError(str(error)) from error
  return Ask(
    requests,
    sum(map(len, prompts)),
    _stops(fields),
    _flag(fields, "stream"),
    _flag(options, "include_usage"),
    shown,
  )


def _fields(body: bytes, chat: bool) -> dict[str, Any]:
  """The fields that are present and not neutral; rejects unknown ones."""
  try:
    fields = json.loads(body, parse_constant=_no_constant)
  except (ValueError, RecursionError) as error:
    raise ClientError(
      f"the body is not valid JSON: {one_line(error, 100)}"
    ) from error
  if not isinstance(fields, dict):
    raise ClientError("the body is not a JSON object")
  fields = {name: x for name, x in fields.items() if x is not None}
  for name, value in fields.items():
    if name in _FIELDS[chat] or name in _IGNORED:
      continue
    if name not in _NEUTRAL:
      raise ClientError(f"there is no field {_short(name)}", param=name[:64])
    if value not in _NEUTRAL[name]:
      raise ClientError(
        f"{name}={_short(value)} is not supported",
        param=name,
        code="unsupported",
      )
  return fields


def _no_constant(name: str) -> float:
  raise ValueError(f"{name} is no number")


def _prompts(
  fields: Mapping[str, Any], reader: Reader
) -> list[tuple[int, ...]]:
  """Token ids of the prompts, from a string, token ids or a list of these."""
  given = fields.get("prompt")
  if (
    isinstance(given, list)
    and given
    and all(type(one) is not int for one in given)
  ):
    if len(given) > MAX_CHOICES:
      raise ClientError(
        f"{len(given)} prompts are more than {MAX_CHOICES}", param="prompt"
      )
    return [_prompt(one, reader) for one in given]
  return [_prompt(given, reader)]


def _prompt(given: Any, reader: Reader) -> tuple[int, ...]:
  if isinstance(given, list) and given and all(type(x) is int for x in given):
    return tuple(given)
  if not isinstance(given, str):
    there = {} if given is None else {"prompt": given}
    raise _wrong(there, "prompt", "a text or a list of token ids")
  return source.encode_prompt(reader.tokenizer, _unicode(given, "prompt"))


def _messages(
  fields: Mapping[str, Any], reader: Reader
) -> list[tuple[int, ...]]:
  """Token ids of a conversation, formatted by the model's chat template."""
  if reader.chat is None:
    raise ClientError(
      "this model has no chat template; ask /v1/completions", param="messages"
    )
  messages = fields.get("messages")
  if not isinstance(messages, list) or not messages:
    raise _wrong(fields, "messages", "a list of messages")
  plain = []
  for message in messages:
    role, content = (
      (message.get("role"), message.get("content"))
      if isinstance(message, dict)
      else (None, None)
    )
    if isinstance(content, list) and all(
      isinstance(part, dict)
      and part.get("type") == "text"
      and isinstance(part.get("text"), str)
      for part in content
    ):
      content = "".join(part["text"] for part in content)
    if role not in ("system", "developer", "user", "assistant") or (
      not isinstance(content, str)
    ):
      raise _wrong(
        {"messages": message}, "messages", "a message with a role and a text"
      )
    plain.append({"role": role, "content": content})
  try:
    text = reader.chat(plain)
  except UserError as error:
    raise ClientError(str(error), param="messages") from error
  (ids,) = reader.tokenizer.encode([_unicode(text, "messages")])
  return [tuple(ids.tolist())]  # The template writes any start token.


def _unicode(text: str, param: str) -> str:
  """The text; rejects lone surrogates, which JSON strings can contain."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ClientError(f"{param} is not valid Unicode", param=param) from error
  return text


def _max_tokens(
  fields: Mapping[str, Any], reader: Reader, num_prompt: int, chat: bool
) -> int:
  """The number of tokens that may be sampled after a prompt."""
  room = reader.limit
  if reader.max_tokens:
    room = min(room, reader.max_tokens - num_prompt)
  if room < 1:
    raise ClientError(
      f"the prompt has {num_prompt} tokens; there is room for"
      f" {reader.max_tokens}, including the answer",
      param="messages" if chat else "prompt",
      code="context_length_exceeded",
    )
  name = "max_tokens"
  if chat and "max_completion_tokens" in fields:
    name = "max_completion_tokens"
  default = room if chat else min(16, room)
  asked = _integer(fields, name, default, 1, 2**31 - 1)
  if asked > room:
    raise ClientError(
      f"{name}={asked} is more than the {room} tokens that fit after a prompt"
      f" of {num_prompt} tokens",
      param=name,
      code="context_length_exceeded",
    )
  return asked


def _log_probabilities(
  fields: Mapping[str, Any], chat: bool
) -> tuple[bool, int]:
  """Whether log-probabilities are requested, and how many alternatives."""
  if not chat:
    return "logprobs" in fields, _integer(fields, "logprobs", 0, 0, 20)
  shown = _flag(fields, "logprobs")
  if "top_logprobs" in fields and not shown:
    raise ClientError(
      "top_logprobs has no effect without logprobs", param="top_logprobs"
    )
  return shown, _integer(fields, "top_logprobs", 0, 0, 20)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
  given = fields.get("stop", [])
  stops = [given] if isinstance(given, str) else given
  if (
    not isinstance(stops, list)
    or len(stops) > 4
    or not all(isinstance(stop, str) and stop for stop in stops)
  ):
    raise _wrong(fields, "stop", "a text or up to four of them, none empty")
  return tuple(stops)


def _text(fields: Mapping[str, Any], name: str, default: str) -> str:
  value = fields.get(name, default)
  if not isinstance(value, str):
    raise _wrong(fields, name, "a text")
  return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
  value = fields.get(name, False)
  if not isinstance(value, bool):
    raise _wrong(fields, name, "true or false")
  return value


def _integer(
  fields: Mapping[str, Any], name: str, default: int, low: int, high: int
) -> int:
  if name not in fields:
    return default
  value = fields[name]
  if type(value) is not int or not low <= value <= high:
    raise _wrong(fields, name, f"an integer from {low} to {high}")
  return value


def _number(
  fields: Mapping[str, Any], name: str, default: float, low: int, high: int
) -> float:
  value = fields.get(name, default)
  if (
    isinstance(value, bool)
    or not isinstance(value, int | float)
    or not low <= value <= high
  ):
    raise _wrong(fields, name, f"a number from {low} to {high}")
  return float(value)


def _wrong(fields: Mapping[str, Any], name: str, wanted: str) -> ClientError:
  if name not in fields:
    return ClientError(f"{name} is missing; give {wanted}", param=name)
  return ClientError(
    f"{name}={_short(fields[name])} is not {wanted}", param=name
  )


def _short(value: Any) -> str:
  return reprlib.repr(value)[:80]
