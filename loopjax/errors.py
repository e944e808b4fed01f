"""The error type for users' mistakes, and an argument parser that raises it."""

import argparse
import contextlib
import difflib
import enum
import errno
import functools
import io
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn


class ExitStatus(enum.IntEnum):
  """How a command ended, for whatever started it.

  A number above 128 says that a signal ended it: JAX aborts processes that wait
  for a lost one. tests/launch compares the rules of all launchers with these.
  """

  DONE = 0
  FAILED = 1  # A crash.
  MISTAKE = 2  # By the user: a command, a setting, data.
  DIVERGED = 3
  STOPPED = 4  # On request, and saved.
  LOST = 5  # Another process of the run is gone.


# After these the same command resumes the run, and launchers start it again.
RESUMABLE = (ExitStatus.STOPPED, ExitStatus.LOST)


class Moot(NamedTuple):
  """A setting that has no effect, or no meaning, because of other settings.

  Attributes:
    setting: "section.key".
    default: the value that leaves it out.
    because: "section.key" of the other settings.
  """

  setting: str
  default: Any
  because: tuple[str, ...]


class UserError(ValueError):
  """A mistake by the user: main prints one line and exits with status 2.

  The message of several mistakes has a line for each.

  Attributes:
    moot: the settings that others make moot, where this is a mistake.
  """

  def __init__(self, message: str = "", moot: tuple[Moot, ...] = ()):
    super().__init__(message)
    self.moot = moot


class MissingPackage(UserError):
  """An optional package is not installed: a fault of no row of the data."""


class Mistakes:
  """The mistakes that independent checks find, to name all of them at once.

  Attributes:
    found: their lines, in order and without repetitions.
    moot: settings that are moot because of others.
  """

  def __init__(self) -> None:
    self.found: dict[str, None] = {}
    self.moot: tuple[Moot, ...] = ()

  @contextlib.contextmanager
  def collected(self) -> Iterator[None]:
    """A UserError raised inside ends the block only."""
    try:
      yield
    except UserError as error:
      self.found |= dict.fromkeys(str(error).split("\n"))
      self.moot += error.moot

  def raise_all(self) -> None:
    """Raises UserError if there are any."""
    if self.found:
      raise UserError("\n".join(self.found), self.moot)


# Raised when the disk is full or write-protected, or a file or its name would
# be too long (`ulimit -f`; 4 GB on a FAT disk).
STORAGE = (
  errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM,
  errno.EFBIG, errno.ENAMETOOLONG,
)  # fmt: skip


# Raised when nothing shows the output any more: a pipe, or a terminal.
NO_READER = (errno.EPIPE, errno.EIO)

_INTERRUPTED = 130  # As shells have it.


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
  """Raises UserError, with the place, where the system permits no writing."""
  try:
    yield
  except OSError as error:
    message = f"{place}: cannot be written: {error.strerror}"
    raise UserError(message) from error


def unreadable(path: str, error: OSError) -> UserError:
  """The error for a file that cannot be read."""
  return UserError(
    f"{path}: cannot be read ({error.strerror or one_line(error)})"
  )


@contextlib.contextmanager
def needing(
  package: str, extra: str, what: str, instead: str = ""
) -> Iterator[None]:
  """Raises MissingPackage where an optional package cannot be imported.

  Args:
    package: its name in the package index.
    extra: the extra of loopjax that installs it.
    what: what "needs" or "need" it, the beginning of the message.
    instead: what to do otherwise, if anything.
  """
  try:
    yield
  except ImportError:
    end = f", or {instead}" if instead else ""
    raise MissingPackage(
      f"{what} the package {package}; install it with pip install"
      f" 'loopjax[{extra}]'{end}"
    ) from None


@functools.cache
def note(text: str) -> None:
  """Writes "note: ..." to standard error, once in a command or process."""
  print(f"note: {text}", file=sys.stderr)


def print_error(error: object) -> None:
  """Writes "error: ..." to standard error, a line for each mistake."""
  for line in str(error).split("\n"):
    print(f"error: {line}", file=sys.stderr)


def one_line_errors(main: Callable[..., int]) -> Callable[..., int]:
  """A command whose UserError becomes one line and exit status 2.

  So does a place that cannot be read or written. The loss of whatever reads its
  output is one line, too, and status 1, and ends the process immediately; after
  Ctrl-C the status is 130.
  """

  @functools.wraps(main)
  def guarded(*args: Any) -> int:
    note.cache_clear()
    if isinstance(sys.stdout, io.TextIOWrapper):
      # A character of another encoding must not end a run, when it is printed.
      sys.stdout.reconfigure(errors="backslashreplace")  # As standard error.
    try:
      status = main(*args)
      if sys.stdout:
        sys.stdout.flush()  # Fails here rather than at the exit.
      return status
    except UserError as error:
      print_error(error)
      return ExitStatus.MISTAKE
    except BrokenPipeError:
      end_without_a_reader()
    except KeyboardInterrupt:
      print()
      return _INTERRUPTED
    except OSError as error:
      if error.errno not in (*STORAGE, errno.EMFILE, errno.ENFILE):
        raise
      print_error(f"{place_of(error, 'a file')}: {error.strerror}")
      return ExitStatus.MISTAKE

  return guarded


def place_of(error: OSError, otherwise: str) -> str:
  """What could not be written; `otherwise` if the error names no file."""
  if error.filename:
    return str(error.filename)
  try:
    print(flush=True)  # Fails again if it is the output.
  except (OSError, ValueError):  # Full, or closed.
    return "standard output"
  return otherwise


def leave(status: int) -> NoReturn:
  """Ends the process with a command's status; after Ctrl-C by the signal."""
  if status == _INTERRUPTED:
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)  # What shells and sweeps look for.
  sys.exit(status)


def end_without_a_reader() -> NoReturn:
  """Ends the process with one line when nothing reads its output any more."""
  print("error: standard output was closed", file=sys.stderr, flush=True)
  # Python would fail again as it flushes the output.
  os._exit(ExitStatus.FAILED)


class Parser(argparse.ArgumentParser):
  """An argument parser that raises UserError instead of exiting.

  Attributes:
    meant: flags by another name that users may expect.
  """

  def __init__(self, *args: Any, **options: Any):
    """Takes what `argparse.ArgumentParser` does."""
    super().__init__(*args, **options)
    self.meant: dict[str, str] = {}

  def error(self, message: str) -> NoReturn:
    """Raises UserError."""
    raise UserError(message)

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses; unknown flags are named before missing arguments."""
    args = sys.argv[1:] if args is None else args
    if not self._subparsers:  # The parser of the subcommand checks its flags.
      for word in args:
        self._check_flag(word)
    options, remaining = super().parse_known_args(args, namespace)
    for name, value in vars(options).items():
      if isinstance(value, pathlib.Path):
        setattr(options, name, local_path(value))
      elif isinstance(value, list):
        paths = [isinstance(one, pathlib.Path) for one in value]
        if paths and all(paths):
          setattr(options, name, [local_path(one) for one in value])
    return options, remaining

  def _check_flag(self, word: str) -> None:
    """Raises UserError if a word is a flag that is unknown or abbreviated."""
    match = re.fullmatch(r"(--\w[\w-]*)(?:=(.*))?", word, re.DOTALL)
    if not match or match[1] in self._option_string_actions:
      return
    flag, value = match.groups()
    arguments = [action.metavar for action in self._actions]
    if flag == "--workdir" and "RUN" in arguments:
      raise UserError(
        "--workdir is for training commands; pass the run as an argument:"
        f" {self.prog} {shlex.quote(value or 'RUN')}"
      )
    near = similar(self.meant.get(flag, flag), self._option_string_actions)
    raise UserError(f"unknown flag {flag!r}{near}")


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
  """A path that a user gave, in which a ~ at the beginning is a home.

  Shells replace it in a word of its own only, not in --flag=~/file.
  """
  expanded = os.path.expanduser(path)
  if match := re.match("(gs|s3):/+(.*)", expanded):
    raise UserError(
      f"{match[1]}://{match[2]}: buckets are unsupported; pass a local path,"
      " such as a mounted bucket"
    )
  return pathlib.Path(expanded)


def similar(name: object, known: Iterable[str]) -> str:
  """A suggestion to append to a message, "; did you mean 'nine'?", or ""."""
  # Dashes, which all flags have in common, make none of them alike.
  words = {one.lstrip("-"): one for one in known}
  near = nearest(str(name).lstrip("-"), words)
  return f"; did you mean {words[near[0]]!r}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
  """At most three names of which one letter or less than a third differs."""
  cutoff = min(0.7, max(0.6, 1 - 1.1 / max(len(name), 1)))
  return difflib.get_close_matches(name, known, cutoff=cutoff)


def one_line(error: BaseException, length: int = 200) -> str:
  """An error's message on one line of at most `length` characters."""
  return " ".join(str(error).split())[:length]
