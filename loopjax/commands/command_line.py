"""The command line of commands that take a config."""

import argparse
import contextlib
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from loopjax import sections
from loopjax.errors import (
  STORAGE,
  Parser,
  UserError,
  local_path,
  place_of,
  similar,
)

_ENDING = threading.Lock()
_SETTING = "--config."
_SOME = 3  # Names that a message lists.


class ConfigParser(Parser):
  """A parser of --config=FILE..., --config.section.key=value and --workdir.

  What it parses has `config`, the config with all changes, or None;
  `config_name`, FILE[:argument]; and `overrides`, the values of the flags
  --config.section.key=value by "section.key".

  With --mode=eval and without --config, the config comes from the run in
  --workdir, or in the argument RUN of a command that has one.
  """

  def __init__(self, prog: str, doc: str):
    """Makes the parser.

    Args:
      prog: how the command is called.
      doc: what it does.
    """
    # (options, a run or the path of import=PATH) -> the run it stands for.
    self.importer: Callable[[Any, str], str] = lambda _, where: where
    super().__init__(
      prog=prog,
      description=doc,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    self.add_argument(
      "--config",
      metavar="FILE",
      help="config file, FILE[:preset][,section.key=value...], or that of a"
      " run, RUN/config.json or FILE.runs.json#NAME;"
      " --config.section.key=value changes a setting",
    )
    self.add_argument(
      "--workdir",
      metavar="DIR",
      help="output directory [runs/<config>[-<preset>][-<sweep>]]",
    )

  def error(self, message: str) -> NoReturn:
    """Raises UserError."""
    if message.startswith("argument --config:"):
      message = "--config needs a FILE"
    raise UserError(message)

  def parse_config(self, words: Sequence[str] | None = None) -> Any:
    """Parses a command line; raises UserError for any mistake in it."""
    words = sys.argv[1:] if words is None else words
    settings = [word for word in words if word.startswith(_SETTING)]
    options, rest = self.parse_known_args(
      [word for word in words if not word.startswith(_SETTING)]
    )
    if rest:
      raise UserError(
        f"{rest[0]!r} is not a flag; {_meant(rest[0]) or 'flags begin with --'}"
      )
    if options.workdir == "":
      raise UserError("--workdir= is empty")
    if run := getattr(options, "run", None):
      for flag in ("config", "workdir"):
        if getattr(options, flag) is not None:
          raise UserError(f"--{flag} has no effect with {run}")
      options.workdir = self.importer(options, run)
    options.config_name, options.overrides = "", {}
    of_run = options.workdir and getattr(options, "mode", "") == "eval"
    if options.config is not None or of_run:
      # They import JAX: not for all flags.
      from loopjax import config as config_lib
      from loopjax.config import presets

      if options.config is None:
        place = local_path(options.workdir)
        options.config = config_lib.config_of_run(place, options.workdir)
      elif re.match(r"[^#]*\.json($|[#,:])", options.config):
        options.config = _recorded(options.config)
      else:
        options.config_name = presets.located(options.config)
        options.config_name = _with_runs(options, self.importer)
        options.config = _load(options.config_name)
      for word in settings:
        key, equals, text = word.removeprefix(_SETTING).partition("=")
        given = text if equals else None
        options.overrides[key] = presets.assign(options.config, key, given)
    return options


def add_processes(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `run.processes.start` to a command line."""
  parser.add_argument(
    "--distributed",
    action="store_true",
    help="join a multi-process run, detected from the machine (TPU pod, SLURM);"
    " not needed if SLURM started several tasks",
  )
  parser.add_argument(
    "--coordinator_address",
    metavar="HOST:PORT",
    help="HOST:PORT of process 0 [JAX_COORDINATOR_ADDRESS]",
  )
  parser.add_argument(
    "--num_processes",
    type=int,
    metavar="N",
    help="number of processes [JAX_NUM_PROCESSES]",
  )
  parser.add_argument(
    "--process_id",
    type=int,
    metavar="I",
    help="index of this process, from 0 [JAX_PROCESS_ID or"
    " JOB_COMPLETION_INDEX]",
  )


def _with_runs(options: Any, importer: Callable[[Any, str], str]) -> str:
  """options.config_name, in which runs take the place of imported folders."""
  from loopjax.config import presets

  path, argument = sections.split_name(options.config_name)
  parts = []
  for part in sections.split(argument):
    key, equals, where = part.partition("=")
    is_import = equals and key == presets.IMPORT
    parts.append(f"{key}={importer(options, where)}" if is_import else part)
  return f"{path}:{','.join(parts)}" if parts else path


def _recorded(name: str) -> Any:
  """The config of RUN/config.json, or of a kept run, FILE.runs.json#NAME."""
  from loopjax import config as config_lib
  from loopjax.run import workdir as workdir_lib

  file, _, item = name.partition("#")
  if not file.endswith(".json"):
    raise UserError(
      f"--config={name}: a recorded config takes --config.section.key=value"
    )
  path = local_path(file)
  if not path.exists():
    raise UserError(f"--config: no such file: {path}")
  if path.name == "config.json" and not item:
    return config_lib.config_of_run(path.parent, f"--config={name}")
  kept = workdir_lib.read_json(path).get("items", [])
  try:
    configs = {x["directory"]: x["config"] for x in kept if "config" in x}
    if item in configs:
      return config_lib.of_record(configs[item])
  except UserError as error:
    raise UserError(
      f"--config={name}: {error}; the run is of an older version of loopjax"
    ) from error
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(
      f"--config={name}: not the config of a loopjax run"
    ) from error
  if any(item.startswith(f"{one},") for one in configs):
    raise UserError(
      f"--config={name}: a recorded config takes --config.section.key=value"
    )
  some = ", ".join([*configs][:_SOME]) or "its runs"
  if len(configs) > _SOME:
    some += f", and {len(configs) - _SOME} more"
  raise UserError(
    f"--config={name}: expected RUN/config.json, or FILE.runs.json#NAME with"
    f" one of {some}{similar(item, configs)}"
  )


def _load(config_name: str) -> Any:
  """The config that --config=FILE[:argument] names, locked."""
  import ml_collections

  from loopjax.config import presets

  file, argument = sections.split_name(config_name)
  path = pathlib.Path(file)
  if not path.exists():
    there = [other.name for other in path.parent.glob("*.py")]
    near = similar(path.name, there) or similar(
      path.stem, [other.stem for other in presets.folder().glob("*_*.py")]
    )
    raise UserError(f"--config: no such file: {path}{near}")
  if path.suffix != ".py":
    raise UserError(f"--config: {path} is not a Python file")
  with presets.running(file):
    get_config = presets.read(file).get("get_config")
    if get_config is None:
      raise UserError("--config: the file defines no get_config")
    config = get_config(argument) if argument else get_config()
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      f"--config: {file}: get_config returned {config!r:.80}, not a config"
    )
  config.lock()
  return config


def _meant(word: str) -> str:
  """What to type for a config that is named without its flag, or ""."""
  from loopjax.config import presets

  path = pathlib.Path(sections.split_name(presets.located(word))[0])
  return f"did you mean --config={word}?" if path.is_file() else ""


@contextlib.contextmanager
def ending_when_full(place: str) -> Iterator[None]:
  """Ends the process with one line if a thread finds the disk full.

  Args:
    place: what the line says if the error names no file.
  """

  def in_a_thread(failed: threading.ExceptHookArgs) -> None:
    """Handles a full disk in other threads as in the main thread."""
    error = failed.exc_value
    if isinstance(error, OSError) and error.errno in STORAGE:
      _end(error, place)
    threading.__excepthook__(failed)

  def without_closed_loops(unraisable: Any) -> None:
    """Reports unraisable exceptions, except one that follows a failed save.

    When a save fails, Orbax closes its event loop while writes are pending.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
      sys.__unraisablehook__(unraisable)

  before = threading.excepthook, sys.unraisablehook
  threading.excepthook = in_a_thread
  sys.unraisablehook = without_closed_loops
  try:
    yield
  except OSError as error:
    if error.errno in STORAGE:
      _end(error, place)
    raise
  finally:
    threading.excepthook, sys.unraisablehook = before


def _end(error: OSError, place: str) -> NoReturn:
  """Ends the process with one line, from the first thread that fails."""
  _ENDING.acquire()  # Never released.
  where = place_of(error, place)
  print(f"error: {where}: {error.strerror}", file=sys.stderr, flush=True)
  os._exit(2)  # Other writers would each fail with a long traceback.
