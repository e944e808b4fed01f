"""Validates request bodies and converts them to `CompletionRequest`."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate.chat import Template
from loopjax.generate.programs.slots import MAX_TOP
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.serve import fields as fields_lib
from loopjax.serve.errors import ClientError

MAX_CHOICES = 128  # Choices of a request, over all its prompts.
_MAX_INT = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("role", "content", "name")  # Of a message.
# They would change the prompt's scores, or what belongs to which part.
_WITHOUT_ECHO = (
  "stream", "stop", "num_loops", "exit_threshold", "prefill_loops",
)  # fmt: skip


class CompletionRequest(NamedTuple):
  """A validated request for completions or chat completions.

  Attributes:
    requests: the engine's requests, one per choice; those of a prompt are
      consecutive. Empty if only the prompts are scored.
    prompts: token ids of each prompt.
    num_choices: choices of each prompt.
    echoed: the text of each prompt, if answers begin with it.
    stops: strings that end a choice.
    stream: whether tokens are sent as they are sampled.
    include_usage: whether the last chunk of a stream reports token counts.
    log_probabilities: whether the log-probabilities of tokens are reported.
    num_top: how many alternatives of a token are reported.
  """

  requests: tuple[GenerationRequest, ...]
  prompts: tuple[tuple[int, ...], ...]
  num_choices: int
  echoed: tuple[str, ...]
  stops: tuple[str, ...]
  stream: bool
  include_usage: bool
  log_probabilities: bool
  num_top: int

  @property
  def num_prompt_tokens(self) -> int:
    """Number of tokens of all prompts."""
    return sum(map(len, self.prompts))


class ServedModel(NamedTuple):
  """The properties of the served model that requests are validated against.

  Attributes:
    name: the model's name in the API.
    tokenizer: the model's tokenizer.
    stop_tokens: ids that end a text.
    max_tokens: maximum number of tokens of a prompt and its completion; None if
      there is no limit.
    max_new_tokens: maximum number of sampled tokens of a choice.
    chat: the model's chat template; None if it has none.
    prefill_loops: `prefill_loops` of a request that has none.
  """

  name: str
  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  max_tokens: int | None
  max_new_tokens: int
  chat: Template | None
  prefill_loops: int = 0


def check_model(name: str, models: Collection[str]) -> None:
  """Raises ClientError unless a model of this name is served."""
  if name not in models:
    raise ClientError(
      f"unknown model {fields_lib.abbreviate(name)}; expected one of"
      f" {', '.join(map(repr, models))}",
      status=404,
      param="model",
      code="model_not_found",
    )


def parse(
  body: bytes, models: Mapping[str, ServedModel], *, chat: bool
) -> tuple[ServedModel, CompletionRequest]:
  """Validates the body of a request; also returns the model that it asks.

  Args:
    body: the body.
    models: the served models by name; the first is asked without a name.
    chat: whether it is a request for chat completions.

  Raises:
    ClientError: a field is missing, unknown or invalid.
  """
  fields = fields_lib.parse(body, chat=chat)
  name = fields_lib.text(fields, "model", next(iter(models)))
  check_model(name, models)
  model = models[name]
  prompts = _messages(fields, model) if chat else _prompts(fields, model)
  echoed = _echoed(fields, model, prompts)
  n = fields_lib.integer(fields, "n", 1, 1, MAX_CHOICES)
  if n * len(prompts) > MAX_CHOICES:
    raise ClientError(
      f"{n * len(prompts)} choices exceed the maximum of {MAX_CHOICES}",
      param="n",
    )
  log_probabilities, num_top = _log_probabilities(fields, chat)
  seed = fields_lib.integer(
    fields, "seed", secrets.randbits(32), -(2**63), 2**63 - 1
  )
  sampling: dict[str, Any] = {
    "temperature": fields_lib.number(fields, "temperature", 1.0, 0, 2),
    "top_p": fields_lib.number(fields, "top_p", 1.0, 0, 1),
    "top_k": fields_lib.integer(fields, "top_k", 0, 0, _MAX_INT),
    "min_p": fields_lib.number(fields, "min_p", 0.0, 0, 1),
    "repetition_penalty": fields_lib.number(
      fields, "repetition_penalty", 1.0, 0, 100
    ),
  }
  stream, include_usage = _stream(fields)
  loops = fields_lib.integer(fields, "num_loops", 0, 1, _MAX_INT)
  # The server's default, unless the request runs fewer loops than that.
  fewer = min(model.prefill_loops, loops or _MAX_INT)
  limit = fields.get("max_tokens")
  generates = not (echoed and type(limit) is int and limit == 0)
  try:
    requests = tuple(
      GenerationRequest(
        prompt=prompt,
        max_new_tokens=_max_tokens(fields, model, len(prompt), chat),
        # Each choice has its own seed; the first has the request's.
        sampling=Sampling(**sampling, seed=(seed + choice) % 2**32),
        stop_tokens=model.stop_tokens,
        top_log_probabilities=num_top,
        num_loops=loops,
        exit_threshold=fields_lib.number(fields, "exit_threshold", 1.0, 0, 1),
        prefill_loops=fields_lib.integer(
          fields, "prefill_loops", fewer, 0, _MAX_INT
        ),
      )
      for prompt in prompts
      for choice in range(n)
      if generates
    )
  except UserError as error:
    raise fields_lib.refused(error) from error
  return model, CompletionRequest(
    requests,
    tuple(prompts),
    num_choices=n,
    echoed=echoed,
    stops=_stops(fields),
    stream=stream,
    include_usage=include_usage,
    log_probabilities=log_probabilities,
    num_top=num_top,
  )


def _stream(fields: Mapping[str, Any]) -> tuple[bool, bool]:
  """(whether the answer is streamed, whether its end reports token counts)."""
  options = fields.get("stream_options", {})
  known = {"include_usage", "include_obfuscation"}
  if not isinstance(options, dict) or options.keys() - known:
    raise fields_lib.invalid(
      fields, "stream_options", "an object with include_usage"
    )
  fields_lib.flag(options, "include_obfuscation")  # It has no effect here.
  stream = fields_lib.flag(fields, "stream")
  if "stream_options" in fields and not stream:
    raise ClientError(
      "stream_options has no effect without stream", param="stream_options"
    )
  return stream, fields_lib.flag(options, "include_usage")


def _prompts(
  fields: Mapping[str, Any], model: ServedModel
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
        f"{len(given)} prompts exceed the maximum of {MAX_CHOICES}",
        param="prompt",
      )
    return [_prompt(one, model) for one in given]
  return [_prompt(given, model)]


def _prompt(given: Any, model: ServedModel) -> tuple[int, ...]:
  """Token ids of one prompt, given as a string or as token ids."""
  if isinstance(given, list) and given and all(type(x) is int for x in given):
    wrong = [x for x in given if not 0 <= x < model.tokenizer.num_real]
    if wrong:
      raise ClientError(
        f"the prompt has token id {wrong[0]}, expected less than"
        f" {model.tokenizer.num_real}",
        param="prompt",
      )
    return tuple(given)
  if not isinstance(given, str):
    field = {} if given is None else {"prompt": given}
    raise fields_lib.invalid(field, "prompt", "a string or a list of token ids")
  return model.tokenizer.encode_prompt(_unicode(given, "prompt"))


def _echoed(
  fields: Mapping[str, Any],
  model: ServedModel,
  prompts: Sequence[tuple[int, ...]],
) -> tuple[str, ...]:
  """The texts of the prompts if answers begin with them, otherwise none."""
  if not fields_lib.flag(fields, "echo"):
    return ()
  for name in _WITHOUT_ECHO:
    if fields.get(name):
      raise ClientError(f"{name} is unsupported with echo", param=name)
  for prompt in prompts:
    if model.max_tokens and len(prompt) > model.max_tokens:
      raise _too_long(len(prompt), model, "prompt")
  given = fields["prompt"]
  texts = given if isinstance(given, list) and len(prompts) > 1 else [given]
  return tuple(
    text if isinstance(text, str) else model.tokenizer.decode(list(prompt))
    for text, prompt in zip(texts, prompts, strict=True)
  )


def _messages(
  fields: Mapping[str, Any], model: ServedModel
) -> list[tuple[int, ...]]:
  """Token ids of a conversation, formatted by the model's chat template."""
  if model.chat is None:
    raise ClientError(
      "this model has no chat template; use /v1/completions", param="messages"
    )
  messages = fields.get("messages")
  if not isinstance(messages, list) or not messages:
    raise fields_lib.invalid(fields, "messages", "a list of messages")
  plain = [_message(message) for message in messages]
  continued = _continued(fields, plain[-1]["role"])
  try:
    text = model.chat(plain, continued=continued)
  except UserError as error:
    raise ClientError(str(error), param="messages") from error
  (ids,) = model.tokenizer.encode([_unicode(text, "messages")])
  return [tuple(ids.tolist())]  # A start token would be in the template.


def _message(given: Any) -> dict[str, str]:
  """A message as templates read it: a role, a text and perhaps a name.

  Other keys, such as `tool_calls`, must be empty: nothing here reads them.
  """
  message = given if isinstance(given, dict) else {}
  content = message.get("content")
  if isinstance(content, list) and all(
    isinstance(part, dict)
    and part.get("type") == "text"
    and isinstance(part.get("text"), str)
    for part in content
  ):
    content = "".join(part["text"] for part in content)
  found = {name: message[name] for name in _TEXTS if message.get(name)}
  if content is not None:
    found["content"] = content
  if (
    message.get("role") not in _ROLES
    or "content" not in found
    or not all(isinstance(text, str) for text in found.values())
  ):
    raise fields_lib.invalid(
      {"messages": given},
      "messages",
      f"a message with a role ({', '.join(_ROLES)}) and a string as content",
    )
  for name, value in message.items():
    if name not in found and value not in (None, "", [], {}):
      raise ClientError(
        f"{fields_lib.abbreviate(name)} of a message is unsupported",
        param="messages",
        code="unsupported",
      )
  return found


def _continued(fields: Mapping[str, Any], role: str) -> bool:
  """Whether the answer continues the last message, as in vLLM's API."""
  continued = fields_lib.flag(fields, "continue_final_message")
  if continued and role != "assistant":
    raise ClientError(
      "continue_final_message needs a last message of the assistant",
      param="continue_final_message",
    )
  if fields.get("add_generation_prompt", not continued) is continued:
    raise ClientError(
      "exactly one of add_generation_prompt and continue_final_message must be"
      " true",
      param="add_generation_prompt",
    )
  fields_lib.flag(fields, "add_generation_prompt")
  return continued


def _unicode(text: str, param: str) -> str:
  """The text; rejects lone surrogates, which JSON strings can contain."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ClientError(f"{param} is not valid Unicode", param=param) from error
  return text


def _max_tokens(
  fields: Mapping[str, Any], model: ServedModel, num_prompt: int, chat: bool
) -> int:
  """The maximum number of tokens to sample after a prompt."""
  room = model.max_new_tokens
  if model.max_tokens:
    room = min(room, model.max_tokens - num_prompt)
  if room < 1:
    raise _too_long(num_prompt, model, "messages" if chat else "prompt")
  name = "max_tokens"
  if chat and "max_completion_tokens" in fields:
    if name in fields:
      raise ClientError(
        "max_tokens and max_completion_tokens mean the same; pass only one",
        param=name,
      )
    name = "max_completion_tokens"
  default = room if chat else min(16, room)
  requested = fields_lib.integer(fields, name, default, 1, _MAX_INT)
  if requested > room == model.max_new_tokens:
    raise ClientError(
      f"{name}={requested} exceeds the server's maximum of {room} new tokens",
      param=name,
    )
  if requested > room:
    raise ClientError(
      f"{name}={requested} is more than the {room} tokens that fit after a"
      f" prompt of {num_prompt} tokens",
      param=name,
      code="context_length_exceeded",
    )
  return requested


def _too_long(num_prompt: int, model: ServedModel, param: str) -> ClientError:
  return ClientError(
    f"the prompt has {num_prompt} tokens; the maximum is {model.max_tokens},"
    " including the answer: the server's --max_tokens",
    param=param,
    code="context_length_exceeded",
  )


def _log_probabilities(
  fields: Mapping[str, Any], chat: bool
) -> tuple[bool, int]:
  """(whether log-probabilities are requested, number of alternatives)."""
  if not chat:
    num_top = fields_lib.integer(fields, "logprobs", 0, 0, MAX_TOP)
    return "logprobs" in fields, num_top
  requested = fields_lib.flag(fields, "logprobs")
  num_top = fields_lib.integer(fields, "top_logprobs", 0, 0, MAX_TOP)
  if num_top and not requested:
    raise ClientError(
      "top_logprobs has no effect without logprobs", param="top_logprobs"
    )
  return requested, num_top


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """The stop strings, given as one string or a list."""
  given = fields.get("stop", [])
  stops = [given] if isinstance(given, str) else given
  if (
    not isinstance(stops, list)
    or len(stops) > 4
    or not all(isinstance(stop, str) and stop for stop in stops)
  ):
    raise fields_lib.invalid(
      fields, "stop", "a string or up to four strings, none empty"
    )
  return tuple(stops)
