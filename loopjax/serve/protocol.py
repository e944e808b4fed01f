"""Request bodies: their fields, and what they ask of the engine.

OpenAI's completions and chat completions have these fields. `num_loops`,
`exit_threshold`, `prefill_loops`, `top_k`, `min_p`, `repetition_penalty`,
`add_generation_prompt` and `continue_final_message` are extensions. A field
that would have no effect here is rejected, never silently ignored.
"""

import re
import reprlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import BeforeValidator, Field

from loopjax.data.text.chat import Template
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate.programs.slots import MAX_TOP
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.serve.errors import ClientError

MAX_CHOICES = 128  # Choices of a request, over all its prompts.
_MAX_INT = 2**31 - 1
# They would change the prompt's scores, or what belongs to which part.
_WITHOUT_ECHO = (
  "stream", "stop", "num_loops", "exit_threshold", "prefill_loops",
)  # fmt: skip
# The engine's names of fields.
_FIELDS = {
  "max_new_tokens": "max_tokens", "top_log_probabilities": "logprobs",
}  # fmt: skip


def _as_list(given: Any) -> Any:
  """A list of prompts, also if there is only one."""
  is_ids = isinstance(given, list) and all(type(x) is int for x in given)
  return [given] if isinstance(given, str) or (given and is_ids) else given


_Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
_Positive = Annotated[int, Field(ge=1, le=_MAX_INT)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]
_Ids = Annotated[list[int], Field(min_length=1)]


class _Fields(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False
  )


class _StreamOptions(_Fields):
  include_usage: bool = False
  include_obfuscation: bool = False  # Without effect.


class _Request(_Fields):
  """The fields of both endpoints."""

  model: str | None = None
  n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
  max_tokens: _Count | None = None
  temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
  top_p: _Share = 1.0
  top_k: _Count = 0
  min_p: _Share = 0.0
  repetition_penalty: Annotated[float, Field(ge=0, le=100)] = 1.0
  seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
  stop: Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_as_list),
    Field(max_length=4),
  ] = []
  stream: bool = False
  stream_options: _StreamOptions | None = None
  num_loops: _Positive | None = None
  exit_threshold: _Share = 1.0
  prefill_loops: _Count | None = None
  # Fields that cannot change the answer.
  user: Any = None
  metadata: Any = None
  store: Any = None
  service_tier: Any = None
  safety_identifier: Any = None
  prompt_cache_key: Any = None
  prompt_cache_retention: Any = None
  # OpenAI's other fields, with the values that have no effect.
  frequency_penalty: _Zero = 0
  presence_penalty: _Zero = 0
  logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _drop_nulls(cls, given: Any) -> Any:
    if not isinstance(given, dict):
      return given
    return {name: value for name, value in given.items() if value is not None}


class _Completion(_Request):
  """A body of /v1/completions."""

  prompt: Annotated[
    list[str | _Ids],
    BeforeValidator(_as_list),
    Field(min_length=1, max_length=MAX_CHOICES),
  ]
  echo: bool = False
  logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
  best_of: Literal[1] = 1
  suffix: Literal[""] = ""


class _Part(_Fields):
  type: Literal["text"]
  text: str


class _Message(_Fields):
  """A message: a role, a text and perhaps a name, as templates read it.

  Other keys, such as `tool_calls`, must be empty: nothing here reads them.
  """

  role: Literal["system", "developer", "user", "assistant"]
  content: str | list[_Part]
  name: str | None = None

  @pydantic.model_validator(mode="before")
  @classmethod
  def _drop_empty(cls, given: Any) -> Any:
    if not isinstance(given, dict):
      return given
    return {
      name: value
      for name, value in given.items()
      if name == "content" or value not in (None, "", [], {})
    }

  def plain(self) -> dict[str, str]:
    """The message with its text in one piece."""
    text = self.content
    if not isinstance(text, str):
      text = "".join(part.text for part in text)
    name = {"name": self.name} if self.name else {}
    return {"role": self.role, "content": text, **name}


class _ChatCompletion(_Request):
  """A body of /v1/chat/completions."""

  messages: list[_Message]
  max_completion_tokens: _Count | None = None
  logprobs: bool = False
  top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
  add_generation_prompt: bool | None = None
  continue_final_message: bool = False
  response_format: dict[Literal["type"], Literal["text"]] = {}
  tools: Annotated[list[Any], Field(max_length=0)] = []
  tool_choice: Literal["none", "auto"] = "none"
  parallel_tool_calls: bool = True
  modalities: list[Literal["text"]] = []
  reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] = "none"
  verbosity: Literal["medium"] = "medium"


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
      f"unknown model {_shown(name)}; expected one of"
      f" {', '.join(map(repr, models))}",
      status=404,
      param="model",
      code="model_not_found",
    )


def refused(error: UserError) -> ClientError:
  """The error for a value that the engine refuses, with the field's name."""
  name = re.match(r"\w+(?==)", str(error))
  found = name and _FIELDS.get(name[0], name[0])
  is_prompt = str(error).startswith("the prompt ")
  return ClientError(str(error), param="prompt" if is_prompt else found)


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
  kind = _ChatCompletion if chat else _Completion
  try:
    asked = kind.model_validate_json(body)
  except pydantic.ValidationError as error:
    raise _invalid(error) from None
  name = next(iter(models)) if asked.model is None else asked.model
  check_model(name, models)
  model = models[name]
  if asked.stream_options and not asked.stream:
    raise _without_effect("stream_options", "stream")
  echoed: tuple[str, ...] = ()
  if isinstance(asked, _ChatCompletion):
    prompts = [_conversation(asked, model)]
    log_probabilities, num_top = asked.logprobs, asked.top_logprobs
    if num_top and not log_probabilities:
      raise _without_effect("top_logprobs", "logprobs")
  else:
    assert isinstance(asked, _Completion)
    prompts = [_prompt(one, model) for one in asked.prompt]
    log_probabilities = asked.logprobs is not None
    num_top = asked.logprobs or 0
    echoed = _echoed(asked, model, prompts)
  num_choices = asked.n * len(prompts)
  if num_choices > MAX_CHOICES:
    raise ClientError(
      f"{num_choices} choices exceed the maximum of {MAX_CHOICES}", param="n"
    )
  seed = secrets.randbits(32) if asked.seed is None else asked.seed
  prefill_loops = asked.prefill_loops
  if prefill_loops is None:
    # The server's default, unless the request runs fewer loops than that.
    prefill_loops = min(model.prefill_loops, asked.num_loops or _MAX_INT)
  generates = not (echoed and asked.max_tokens == 0)
  try:
    requests = tuple(
      GenerationRequest(
        prompt=prompt,
        max_new_tokens=_max_tokens(asked, model, len(prompt)),
        sampling=Sampling(
          temperature=asked.temperature,
          top_p=asked.top_p,
          top_k=asked.top_k,
          min_p=asked.min_p,
          repetition_penalty=asked.repetition_penalty,
          # Each choice has its own seed; the first has the request's.
          seed=(seed + choice) % 2**32,
        ),
        stop_tokens=model.stop_tokens,
        top_log_probabilities=num_top,
        num_loops=asked.num_loops or 0,
        exit_threshold=asked.exit_threshold,
        prefill_loops=prefill_loops,
      )
      for prompt in prompts
      for choice in range(asked.n)
      if generates
    )
  except UserError as error:
    raise refused(error) from error
  options = asked.stream_options
  return model, CompletionRequest(
    requests,
    tuple(prompts),
    num_choices=asked.n,
    echoed=echoed,
    stops=tuple(asked.stop),
    stream=asked.stream,
    include_usage=bool(options and options.include_usage),
    log_probabilities=log_probabilities,
    num_top=num_top,
  )


def _invalid(error: pydantic.ValidationError) -> ClientError:
  """The first mistake of a body, in a line."""
  first = error.errors(include_url=False, include_context=False)[0]
  place, kind = [str(part)[:64] for part in first["loc"]], first["type"]
  message = first["msg"][:100]
  if not place:
    return ClientError(f"the body: {message}")
  if kind == "extra_forbidden" and len(place) == 1:
    message = f"unknown field {place[0]!r}"
  elif kind == "missing":
    message = f"{'.'.join(place)} is missing"
  else:
    message = f"{'.'.join(place[:3])}={_shown(first['input'])}: {message}"
  return ClientError(message, param=place[0])


def _without_effect(name: str, other: str) -> ClientError:
  return ClientError(f"{name} has no effect without {other}", param=name)


def _prompt(given: str | list[int], model: ServedModel) -> tuple[int, ...]:
  """Token ids of one prompt, given as a string or as token ids."""
  if isinstance(given, str):
    return model.tokenizer.encode_prompt(given)
  wrong = [x for x in given if not 0 <= x < model.tokenizer.num_real]
  if wrong:
    raise ClientError(
      f"the prompt has token id {wrong[0]}, expected less than"
      f" {model.tokenizer.num_real}",
      param="prompt",
    )
  return tuple(given)


def _echoed(
  asked: _Completion, model: ServedModel, prompts: Sequence[tuple[int, ...]]
) -> tuple[str, ...]:
  """The texts of the prompts if answers begin with them, otherwise none."""
  if not asked.echo:
    return ()
  for name in _WITHOUT_ECHO:
    if name in asked.model_fields_set and getattr(asked, name):
      raise ClientError(f"{name} is unsupported with echo", param=name)
  for prompt in prompts:
    if model.max_tokens and len(prompt) > model.max_tokens:
      raise _too_long(len(prompt), model, "prompt")
  return tuple(
    text if isinstance(text, str) else model.tokenizer.decode(text)
    for text in asked.prompt
  )


def _conversation(
  asked: _ChatCompletion, model: ServedModel
) -> tuple[int, ...]:
  """Token ids of a conversation, formatted by the model's chat template."""
  if model.chat is None:
    raise ClientError(
      "this model has no chat template; use /v1/completions", param="messages"
    )
  if not asked.messages:
    raise ClientError("messages=[] has no message", param="messages")
  continued = asked.continue_final_message  # As in vLLM's API.
  if continued and asked.messages[-1].role != "assistant":
    raise ClientError(
      "continue_final_message needs a last message of the assistant",
      param="continue_final_message",
    )
  if asked.add_generation_prompt is continued:
    raise ClientError(
      "exactly one of add_generation_prompt and continue_final_message must be"
      " true",
      param="add_generation_prompt",
    )
  try:
    text = model.chat(
      [message.plain() for message in asked.messages], continued=continued
    )
  except UserError as error:
    raise ClientError(str(error), param="messages") from error
  (ids,) = model.tokenizer.encode([text])
  return tuple(ids.tolist())  # A start token would be in the template.


def _max_tokens(
  asked: _Completion | _ChatCompletion, model: ServedModel, num_prompt: int
) -> int:
  """The maximum number of tokens to sample after a prompt."""
  chat = isinstance(asked, _ChatCompletion)
  room = model.max_new_tokens
  if model.max_tokens:
    room = min(room, model.max_tokens - num_prompt)
  if room < 1:
    raise _too_long(num_prompt, model, "messages" if chat else "prompt")
  name, requested = "max_tokens", asked.max_tokens
  completion_tokens = getattr(asked, "max_completion_tokens", None)
  if completion_tokens is not None:
    if requested is not None:
      raise ClientError(
        "max_tokens and max_completion_tokens mean the same; pass only one",
        param=name,
      )
    name, requested = "max_completion_tokens", completion_tokens
  if requested is None:
    return room if chat else min(16, room)
  if requested == 0:
    raise ClientError(f"{name}=0 generates nothing", param=name)
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
    " including the answer",
    param=param,
    code="context_length_exceeded",
  )


def _shown(value: Any) -> str:
  """A value for an error message, at most 80 characters."""
  return reprlib.repr(value)[:80]
