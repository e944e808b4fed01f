"""What all commands share: two flags, and mistakes that become one line."""

import errno
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from loopjax.errors import UserError

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, FILE[:preset][,section.key=value...]."
)
# What a full or protected disk raises.
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_ENDING = threading.Lock()
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where to write; runs/<config>[-<preset>][-<sweep>] if not."
)


def run(
  entry: Callable[[list[str]], int], guide: Callable[[], str] | None = None
) -> None:
  """Runs a command; a UserError is one line and exit status 2.

  Args:
    entry: argv -> exit status.
    guide: what --help says between what the command is and its flags.
  """

  def guarded(parse_or_entry, *args):
    try:
      return parse_or_entry(*args)
    except UserError as error:
      print(f"error: {error}", file=sys.stderr)
      sys.exit(2)
    except OSError as error:
      if error.errno not in _STORAGE:
        raise
      _end_for_want_of_storage(error)

  if {"--help", "-help", "-h"} & set(sys.argv[1:]):
    print((sys.modules["__main__"].__doc__ or "").strip())
    print(f"\n{guide()}" if guide else "")
    print(flags.FLAGS.main_module_help().strip())
    sys.exit()
  threading.excepthook = _in_a_thread
  sys.unraisablehook = _without_closed_loops
  logging.set_verbosity(logging.WARNING)
  app.run(
    lambda argv: sys.exit(guarded(entry, argv)),
    flags_parser=lambda argv: guarded(_parse, argv),
  )


def config_name() -> str:
  """What --config was: FILE[:argument]."""
  return config_flags.get_config_filename(flags.FLAGS["config"])


def overrides() -> dict[str, Any]:
  """{"section.key": value} of the flags --config.section.key=value."""
  return config_flags.get_override_values(flags.FLAGS["config"])


def _end_for_want_of_storage(error: OSError) -> None:
  """Ends the process with one line; of all threads that fail the first does."""
  _ENDING.acquire()  # And never released.
  flag = f"--workdir={WORKDIR.value}" if WORKDIR.value else "work directory"
  where = error.filename or flag
  print(f"error: {where}: {error.strerror}", file=sys.stderr, flush=True)
  os._exit(2)  # Whatever still wants to write would fail at length.


def _in_a_thread(failed: threading.ExceptHookArgs) -> None:
  """Threads that write meet a full disk as the main one does."""
  error = failed.exc_value
  if isinstance(error, OSError) and error.errno in _STORAGE:
    _end_for_want_of_storage(error)
  threading.__excepthook__(failed)


def _without_closed_loops(unraisable) -> None:
  """Reports what no code can catch, but for the echo of a save that failed.

  When a save fails Orbax closes its event loop under writes that still answer.
  """
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags; whatever is wrong with them is the user's mistake."""
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(f"{rest[1]!r} is no flag; flags begin with --")
    if CONFIG.value is not None:
      CONFIG.value.items()  # A file that is not there is noticed only now.
    return rest
  except UserError:
    raise
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    said: object = e
    while isinstance(said, Exception) and said.args:
      said = said.args[0]
    raise UserError(_in_one_line(str(said))) from e
  except (OSError, ImportError, SyntaxError) as error:
    last_line = str(error).strip().splitlines()[-1].strip()
    raise UserError(f"--config: {last_line}") from error


def _in_one_line(message: str) -> str:
  """What a message says, less the traceback of a config file that it quotes."""
  _, traceback, quoted = message.partition("Traceback (most recent call")
  if not traceback:
    return " ".join(message.split())
  *where, what = quoted.strip().splitlines()
  error = f"{UserError.__module__}.{UserError.__name__}: "
  if what.startswith(error):
    return what.removeprefix(error)
  lines = [line.strip() for line in where if line.strip().startswith("File ")]
  return f"{lines[-1]}: {what}"
