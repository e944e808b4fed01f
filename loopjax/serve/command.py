"""The command: loads a model, creates its engine and serves until a signal."""

import contextlib
import pathlib
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import uvicorn

from loopjax import checks
from loopjax.commands import hosts
from loopjax.data.text import chat
from loopjax.errors import UserError
from loopjax.eval.scorer import Scorer, ScoringRequest
from loopjax.generate import source
from loopjax.generate.engine import Engine
from loopjax.generate.programs.slots import MAX_TOP
from loopjax.generate.requests import GeneratedToken, GenerationRequest
from loopjax.saved.language_model import LanguageModel
from loopjax.serve import app as app_lib
from loopjax.serve.protocol import ServedModel
from loopjax.serve.worker import Worker

_MIN_TOKEN_LENGTH = 16  # Characters.
_GRACE_SECONDS = 30  # Time for running requests after a shutdown signal.
# Longer than clients keep theirs (httpx: 5 s): else both end one at the same
# time, and a request on it is lost.
_IDLE_SECONDS = 30


class Options(NamedTuple):
  """The flags; see `loopjax.serve.__main__`."""

  model: source.ModelFlags
  name: str | None
  also: list[pathlib.Path]
  host: str
  port: int
  token_file: pathlib.Path | None
  allowed_hosts: str
  cors: str
  slots: int
  max_waiting: int
  max_new_tokens: int | None
  max_connections: int
  prefill_loops: int


def run(options: Options) -> int:
  """Serves until SIGTERM or Ctrl-C; returns the exit status.

  After the signal, running requests have 30 s to finish.

  Raises:
    UserError: flags contradict each other, the model cannot be read, or the
      address cannot be bound.
  """
  token = _token(options)
  _check(options)
  with contextlib.closing(hosts.bind(options.host, options.port)) as listener:
    served: list[app_lib.Served] = []

    def fail() -> None:
      server.should_exit = True

    for flags, name in _models(options):
      served.append(_served(options, flags, name, fail))
    server = _server(options, served, token)
    return _serve(options, server, served, listener)


def _models(options: Options) -> list[tuple[source.ModelFlags, str]]:
  """The models and their names; the flags of a model are the first one's."""
  flags = [options.model, *map(source.ModelFlags, options.also)]
  names = [one.folder.resolve().name for one in flags]
  names[0] = options.name or names[0]
  for name in names:
    if names.count(name) > 1:
      raise UserError(
        f"several of the served models are named {name!r}; --name names the"
        " first one, and the others have the names of their directories"
      )
  return list(zip(flags, names, strict=True))


def _served(
  options: Options,
  flags: source.ModelFlags,
  name: str,
  on_failure: Callable[[], None],
) -> app_lib.Served:
  """Loads a model, and compiles its engine's programs.

  Raises:
    UserError: this model's prompts cannot be read with so many loops.
  """
  language_model = source.load(flags)
  engine = source.engine_from_flags(
    language_model, flags, num_slots=options.slots
  )
  # Of another model's loops the flag says nothing.
  fewer = options.prefill_loops if flags is options.model else 0
  _compile(name, language_model, engine, fewer)
  capacity = options.slots + options.max_waiting
  limit = (
    options.max_new_tokens or flags.max_tokens or language_model.context_length
  )
  model = ServedModel(
    name,
    language_model.tokenizer,
    language_model.stop_tokens,
    engine.limits.max_tokens,
    limit,
    _template(source.template_folder(flags)),
    fewer,
  )
  score = prompt_scorer(language_model, engine.limits.max_tokens)
  return app_lib.Served(Worker(engine, capacity, on_failure), model, score)


def _compile(
  name: str,
  language_model: LanguageModel,
  engine: Engine,
  prefill_loops: int,
) -> None:
  """Checks the server's `prefill_loops`, and compiles all programs."""
  begin = language_model.tokenizer.begin
  engine.limits.check(
    GenerationRequest((begin,), 1, prefill_loops=prefill_loops)
  )
  print(f"compiling the programs of {name}", flush=True)
  start = time.monotonic()
  num = engine.compile(prefill_loops=prefill_loops > 0)
  print(f"{num} programs in {time.monotonic() - start:.0f} s", flush=True)


def prompt_scorer(
  language_model: LanguageModel, max_tokens: int | None
) -> app_lib.Score:
  """A function from a prompt to its tokens after the first, with their scores.

  Each length, rounded up, is compiled at its first use.

  Args:
    language_model: the model.
    max_tokens: maximum length of a prompt; None for any.
  """
  length = max_tokens or sys.maxsize
  scorer = Scorer(
    language_model._replace(context_length=length), num_top=MAX_TOP
  )

  def score(prompt: Sequence[int]) -> list[GeneratedToken]:
    tokens = np.asarray(prompt, np.int32)
    if len(tokens) == 1:
      return []
    (found,) = scorer([ScoringRequest(tokens[:1], tokens[1:])])
    assert found.top is not None
    ids, values = (x.tolist() for x in found.top)
    return [
      GeneratedToken(0, token, value, tuple(zip(*top, strict=True)), 0, None)
      for token, value, *top in zip(
        prompt[1:], found.log_probs.tolist(), ids, values, strict=True
      )
    ]

  return score


def _server(
  options: Options, served: list[app_lib.Served], token: str
) -> uvicorn.Server:
  """The server of some models."""
  names = hosts.allowed(options.allowed_hosts)
  is_local = hosts.is_local(options.host)
  return uvicorn.Server(
    uvicorn.Config(
      app_lib.make_app(
        served,
        token=token,
        hosts=[*hosts.LOCAL, *names] if names or is_local else ["*"],
        origins=hosts.listed(options.cors),
      ),
      # uvicorn refuses the connection that reaches the limit.
      limit_concurrency=options.max_connections + 1,
      log_level="warning",
      access_log=False,
      ws="none",
      timeout_graceful_shutdown=_GRACE_SECONDS,
      timeout_keep_alive=_IDLE_SECONDS,
    )
  )


def _serve(
  options: Options,
  server: uvicorn.Server,
  served: list[app_lib.Served],
  listener: socket.socket,
) -> int:
  """Serves on a bound socket; returns the exit status."""
  host, port = listener.getsockname()[:2]
  address = f"[{host}]" if ":" in host else host
  names = ", ".join(one.model.name for one in served)
  print(
    f"serving {names} at http://{address}:{port}/v1: {options.slots} requests"
    f" in parallel, {options.max_waiting} in the queue",
    flush=True,
  )
  # uvicorn re-raises the signal that stopped it.
  with _ignored(signal.SIGTERM), _ignored(signal.SIGINT):
    server.run(sockets=[listener])
  print("ended", flush=True)
  return 1 if any(one.worker.failed for one in served) else 0


@contextlib.contextmanager
def _ignored(number: signal.Signals):
  """A context in which a signal is ignored."""
  before = signal.signal(number, lambda *_: None)
  try:
    yield
  finally:
    signal.signal(number, before)


def _template(folder: pathlib.Path) -> chat.Template | None:
  """The chat template; None if there is none."""
  try:
    return chat.template(folder)
  except UserError as error:
    print(f"chat completions are not available: {error}", flush=True)
    return None


def _token(options: Options) -> str:
  """The bearer token; "" if only local clients can connect."""
  if options.token_file is None:
    if hosts.is_local(options.host):  # They need no token.
      return ""
    raise UserError(
      f"--host={options.host} accepts connections from other machines; give"
      " --token_file=FILE with the bearer token that clients must send"
    )
  try:
    token = options.token_file.read_text(encoding="utf-8").strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f"--token_file={options.token_file}: cannot be read: {error}"
    ) from error
  is_text = token.isascii() and token.isprintable()
  if len(token) < _MIN_TOKEN_LENGTH or not is_text:
    raise UserError(
      f"--token_file={options.token_file}: the token must have at least"
      f" {_MIN_TOKEN_LENGTH} characters, all of them printable ASCII"
    )
  return token


def _check(options: Options) -> None:
  """Raises UserError for flags that are out of range or contradictory."""
  source.check(options.model)
  hosts.allowed(options.allowed_hosts)
  for origin in hosts.listed(options.cors):
    if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
      raise UserError(
        f"--cors={origin} is not an origin such as https://example.org"
      )
  hosts.check_port(options.port)
  checks.flags_at_least(
    options,
    slots=1,
    max_waiting=0,
    max_new_tokens=1,
    max_connections=1,
    prefill_loops=0,
  )
