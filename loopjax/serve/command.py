"""The command: loads a model, makes its engine and serves until a signal."""

import contextlib
import pathlib
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

import uvicorn

from loopjax.errors import UserError
from loopjax.generate import chat, source
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.hub import convert
from loopjax.language_model import LanguageModel
from loopjax.serve import app as app_lib
from loopjax.serve.protocol import Reader
from loopjax.serve.worker import Worker

_LOCAL = ("127.0.0.1", "localhost")  # Clients on these addresses need no token.
_LEAST = 16  # Minimum length of a token, in characters.
_GRACE = 30  # Seconds that running requests may take after a shutdown signal.


class Options(NamedTuple):
  """The flags; see `loopjax.serve.__main__`."""

  model: source.ModelFlags
  name: str | None
  host: str
  port: int
  token_file: pathlib.Path | None
  slots: int
  max_waiting: int
  max_new_tokens: int | None


def run(options: Options) -> int:
  """Serves until SIGTERM or Ctrl-C; returns the exit status.

  Running requests then have 30 s to finish.

  Raises:
    UserError: flags contradict each other, the model cannot be read, or the
      address cannot be bound.
  """
  token = _token(options)
  _check(options)
  with contextlib.closing(_bound(options)) as bound:
    language_model = source.load(options.model)
    engine = source.engine_from_flags(
      language_model, options.model, num_slots=options.slots
    )
    # Compile now, so that the first client neither waits nor finds it broken.
    engine.generate([GenerationRequest((language_model.tokenizer.end,), 2)])
    return _serve(options, language_model, engine, token, bound)


def _serve(
  options: Options,
  language_model: LanguageModel,
  engine: Engine,
  token: str,
  bound: socket.socket,
) -> int:
  flags = options.model
  name = options.name or flags.folder.resolve().name
  worker = Worker(engine, options.slots + options.max_waiting, lambda: stop())
  limit = (
    options.max_new_tokens or flags.max_tokens or language_model.context_length
  )
  template = _template(flags.hub or flags.folder / convert.DIRECTORY)
  reader = Reader(
    name, language_model.tokenizer, engine.max_tokens, limit, template
  )
  local = options.host in _LOCAL
  server = uvicorn.Server(
    uvicorn.Config(
      app_lib.make_app(
        worker, reader, token=token, hosts=list(_LOCAL) if local else ["*"]
      ),
      log_level="warning",
      access_log=False,
      ws="none",
      timeout_graceful_shutdown=_GRACE,
    )
  )

  def stop() -> None:
    server.should_exit = True

  host, port = bound.getsockname()[:2]
  place = f"[{host}]" if ":" in host else host
  print(
    f"serving {name} at http://{place}:{port}/v1: {options.slots} texts at"
    f" once, {options.max_waiting} may wait",
    flush=True,
  )
  # uvicorn re-raises the signal that stopped it.
  with _handled(signal.SIGTERM), _handled(signal.SIGINT):
    server.run(sockets=[bound])
  print("ended", flush=True)
  return 1 if worker.broken else 0


@contextlib.contextmanager
def _handled(number: signal.Signals):
  """Installs a handler that ignores a signal, for the time of the context."""
  before = signal.signal(number, lambda *_: None)
  try:
    yield
  finally:
    signal.signal(number, before)


def _template(folder: pathlib.Path) -> Callable[[chat.Messages], str] | None:
  """The function from messages to a prompt; prints why if there is none."""
  try:
    return chat.template(folder)
  except UserError as error:
    print(f"no conversations: {error}", flush=True)
    return None


def _token(options: Options) -> str:
  """The bearer token; "" if only this machine can connect."""
  if options.token_file is None:
    if options.host in _LOCAL:
      return ""
    raise UserError(
      f"--host={options.host} accepts other machines; give --token_file=FILE"
      " with the bearer token that they must send"
    )
  try:
    token = options.token_file.read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f"--token_file={options.token_file}: cannot be read: {error}"
    ) from error
  if len(token) < _LEAST or not (token.isascii() and token.isprintable()):
    raise UserError(
      f"--token_file={options.token_file}: a token has at least {_LEAST}"
      " characters, all of them ASCII"
    )
  return token


def _bound(options: Options) -> socket.socket:
  """A socket bound to --host and --port."""
  family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
  try:
    return socket.create_server((options.host, options.port), family=family)
  except OSError as error:
    raise UserError(
      f"--host={options.host} --port={options.port}: {error}"
    ) from error


def _check(options: Options) -> None:
  """Raises UserError for flags that are out of range or contradictory."""
  source.check(options.model)
  if not 0 <= options.port <= 65_535:
    raise UserError(f"--port={options.port} must be from 0 to 65535")
  for name, least in (
    ("slots", 1),
    ("max_waiting", 0),
    ("max_new_tokens", 1),
  ):
    value = getattr(options, name)
    if value is not None and value < least:
      raise UserError(f"--{name}={value} must be at least {least}")
