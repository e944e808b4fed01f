"""Shared by all commands: two flags, and one-line error messages."""

import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from loopjax.errors import (
  STORAGE,
  UserError,
  end_without_a_reader,
  print_error,
  similar,
)

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, FILE[:preset][,section.key=value...]."
)
_ENDING = threading.Lock()
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Output directory [runs/<config>[-<preset>][-<sweep>]]."
)


def run(entry: Callable[[list[str]], int]) -> None:
  """Runs a command; a UserError becomes one line and exit status 2.

  Ctrl-C ends the process by its signal, without a traceback.

  Args:
    entry: function from argv to the exit status.
  """

  def guarded(parse_or_entry, *args):
    try:
      return parse_or_entry(*args)
    except UserError as error:
      print_error(error)
      sys.exit(2)
    except BrokenPipeError:
      end_without_a_reader()
    except KeyboardInterrupt:
      print(flush=True)
      signal.signal(signal.SIGINT, signal.SIG_DFL)
      signal.raise_signal(signal.SIGINT)  # What shells and sweeps look for.
    except OSError as error:
      if error.errno not in STORAGE:
        raise
      _end_for_want_of_storage(error)

  if {"--help", "-help", "-h"} & set(sys.argv[1:]):
    what = (sys.modules["__main__"].__doc__ or "").strip()
    # In one write, so that a reader of its first lines may close the pipe.
    print(f"{what}\n\n{flags.FLAGS.main_module_help().strip()}")
    sys.exit()
  threading.excepthook = _in_a_thread
  sys.unraisablehook = _without_closed_loops
  logging.set_verbosity(logging.WARNING)
  app.run(
    lambda argv: sys.exit(guarded(entry, argv)),
    flags_parser=lambda argv: guarded(_parse, argv),
  )


def config_name() -> str:
  """The value of --config: FILE[:argument]."""
  return config_flags.get_config_filename(flags.FLAGS["config"])


def overrides() -> dict[str, Any]:
  """{"section.key": value} from the flags --config.section.key=value."""
  return config_flags.get_override_values(flags.FLAGS["config"])


def _end_for_want_of_storage(error: OSError) -> None:
  """Ends the process with one line, from the first thread that fails."""
  _ENDING.acquire()  # Never released.
  flag = f"--workdir={WORKDIR.value}" if WORKDIR.value else "work directory"
  where = error.filename or flag
  print(f"error: {where}: {error.strerror}", file=sys.stderr, flush=True)
  os._exit(2)  # Other writers would each fail with a long traceback.


def _in_a_thread(failed: threading.ExceptHookArgs) -> None:
  """Handles a full disk in other threads as in the main thread."""
  error = failed.exc_value
  if isinstance(error, OSError) and error.errno in STORAGE:
    _end_for_want_of_storage(error)
  threading.__excepthook__(failed)


def _without_closed_loops(unraisable) -> None:
  """Reports unraisable exceptions, except one that follows a failed save.

  When a save fails, Orbax closes its event loop while writes are pending.
  """
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; any error in them is a UserError."""
  argv = after_colon([_located(word) for word in _joined(argv)])
  sys.argv = argv  # Where ml_collections looks for --config.section.key.
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(
        f"{rest[1]!r} is not a flag; {_meant(rest[1]) or 'flags begin with --'}"
      )
    if WORKDIR.value == "":
      raise UserError("--workdir= is empty")
    if CONFIG.value is not None:
      CONFIG.value.items()  # Raises if the file is missing.
    return rest
  except UserError:
    raise
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    if place := _place(e, argv):
      raise UserError(f"--config: {place}: {_said(e)}") from e
    if isinstance(e, AttributeError | KeyError) and "Traceback" not in str(e):
      _check_settings(argv)  # The file itself is valid and can be read again.
    if str(e).endswith("has no attribute 'get_config'"):
      raise UserError("--config: the file defines no get_config") from e
    said: object = e
    while isinstance(said, Exception) and said.args:
      said = said.args[0]
    raise UserError(_in_one_line(str(said))) from e
  except (OSError, ImportError, NameError, SyntaxError) as error:
    given = [word for word in argv if word.startswith("--config=")]
    path = pathlib.Path(given[-1].partition("=")[2].partition(":")[0])
    if not path.exists():
      there = [other.name for other in path.parent.glob("*.py")]
      near = similar(path.name, there) or _similar_config(path)
      said = f"--config: no such file: {path}{near}"
      raise UserError(said) from error
    if path.suffix != ".py":
      raise UserError(f"--config: {path} is not a Python file") from error
    place = _place(error, argv) or str(path)
    raise UserError(f"--config: {place}: {_said(error)}") from error


def _place(error: BaseException, argv: list[str]) -> str:
  """FILE, line N of the config in which an error was raised, or ""."""
  files = {
    word.partition("=")[2].partition(":")[0]
    for word in argv
    if word.startswith("--config=")
  }
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename in files]
  return f"{files.pop()}, line {lines[-1]}" if lines else ""


def _said(error: BaseException) -> str:
  """The kind of an error, and the last line of its message."""
  last_line = (str(error).strip() or "no message").splitlines()[-1].strip()
  return f"{type(error).__name__}: {last_line}"


def _joined(argv: list[str]) -> list[str]:
  """The command line with `--config FILE`, two words, as `--config=FILE`."""
  words: list[str] = []
  for word in argv:
    if words and words[-1] == "--config":
      words[-1] += f"={word}"
    else:
      words.append(word)
  if words[-1] == "--config":
    raise UserError("--config needs a FILE")
  return words


def _located(word: str) -> str:
  """A word of the command line, with the file that --config=NAME is."""
  flag, equals, value = word.partition("=")
  if flag != "--config" or not equals:
    return word
  from loopjax.config import presets  # Imports JAX: not for all flags.

  return f"{flag}={presets.located(value)}"


def _meant(word: str) -> str:
  """What to type for a config that is named without its flag, or ""."""
  from loopjax.config import presets

  path = pathlib.Path(presets.located(word).partition(":")[0])
  return f"did you mean --config={word}?" if path.is_file() else ""


def after_colon(argv: list[str]) -> list[str]:
  """Words of which flags like --config.model.update follow --config's colon.

  Settings that are named as methods of a ConfigDict cannot be flags.
  """
  moved = [
    word
    for word in argv
    if word.startswith("--config.")
    and hasattr(
      ml_collections.ConfigDict, word.partition("=")[0].rpartition(".")[2]
    )
  ]
  words = [word for word in argv if word not in moved]
  files = [i for i, word in enumerate(words) if word.startswith("--config=")]
  for word in moved if files else ():
    last = words[files[-1]]
    joint = "," if ":" in last else ":"
    words[files[-1]] = f"{last}{joint}{word.removeprefix('--config.')}"
  return words


def _similar_config(path: pathlib.Path) -> str:
  """A suggestion of a config of loopjax, or ""."""
  from loopjax.config import presets

  there = [other.stem for other in presets.folder().glob("*_*.py")]
  return similar(path.stem, there)


def _check_settings(argv: list[str]) -> None:
  """Raises UserError for an unknown setting in --config.section.key=value."""
  from loopjax import config as config_lib
  from loopjax import sections
  from loopjax.config import presets

  flag = "--config"
  given = [word.removeprefix(flag) for word in argv if word.startswith(flag)]
  files = [word[1:] for word in given if word.startswith("=")]
  keys = [word[1:].partition("=")[0] for word in given if word.startswith(".")]
  if files and keys:
    path, _, argument = files[-1].partition(":")
    known = presets.read(path)["get_config"](argument)
    for key in keys:
      config_lib.check_key(key, sections.flatten(known))


def _in_one_line(message: str) -> str:
  """A message without the traceback of a config file that it quotes."""
  _, traceback, quoted = message.partition("Traceback (most recent call")
  if not traceback:
    return " ".join(message.split())
  *where, what = quoted.strip().splitlines()
  error = f"{UserError.__module__}.{UserError.__name__}: "
  if what.startswith(error):
    return what.removeprefix(error)
  lines = [line.strip() for line in where if line.strip().startswith("File ")]
  return f"{lines[-1]}: {what}"
