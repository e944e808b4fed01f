"""Trains and evaluates a model.

  loopjax train --config=FILE[:preset][,section.key=value...]

The default preset is :tiny; --list shows the configs and their presets. The
same command resumes a run that was stopped; --extend continues one with more
steps. --config.section.key=value changes a setting, --workdir=DIR sets where
the run writes; `loopjax describe` prints sizes, costs and settings. Without
--config, --mode=eval takes the config of the run in --workdir.

Exit status: 0 completed, 1 failed, 2 a mistake by the user, 3 training
diverged, 4 preempted (the run saved a checkpoint and stopped on request), 5
another process of the run was lost. After 4 and 5 the same command resumes the
run.
"""

import os
import pathlib
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from loopjax.commands import command_line
from loopjax.errors import (
  ExitStatus,
  UserError,
  leave,
  local_path,
  one_line,
  one_line_errors,
  print_error,
)

_STATUS = {
  "completed": ExitStatus.DONE,
  "diverged": ExitStatus.DIVERGED,
  "preempted": ExitStatus.STOPPED,
}
# Schedulers judge a run by the process that ends first: one that lost another
# leaves that to it.
_SECONDS_AFTER_A_LOSS = 3
MODES = ("train", "eval", "train_and_eval")


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax train", __doc__ or "")
  result.add_argument(
    "--mode",
    choices=MODES,
    default="train_and_eval",
    help="what to do [train_and_eval]",
  )
  result.add_argument(
    "--list", action="store_true", help="list the configs and their presets"
  )
  result.add_argument(
    "--extend",
    action="store_true",
    help="continue the run in --workdir, finished or not, with a larger"
    " run.num_steps or another run.batch_size",
  )
  result.add_argument(
    "--unchecked",
    action="store_true",
    help="train a family from outside the package without `check_family`",
  )
  command_line.add_processes(result)
  result.importer = imported
  result.set_defaults(limit=0)
  return result


def imported(options: Any, where: str) -> str:
  """The run of a folder of the Hub or a GGUF file; other names unchanged."""
  from loopjax.hub import imported as imported_lib

  alone = not (options.distributed or options.num_processes)
  return imported_lib.run_of(where, alone=alone)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command that --mode names; returns the exit status."""
  return start(parser().parse_config(argv))


def start(options: Any) -> int:
  """Runs the command that options of `parser` name; returns the status."""
  import jax  # Takes long, and so do the next: not to check flags.

  from loopjax import config as config_lib
  from loopjax.run import naming, processes, user_cache, zoo

  user_cache.keep_compiled()
  config, mode = options.config, options.mode
  if options.extend and mode == "eval":
    raise UserError(f"--extend has no effect with --mode={mode}")
  if options.list:
    from loopjax.commands import describe

    print(describe.listing())
    return 0
  if config is None:
    raise UserError("--config=FILE is missing; --list shows the configs")
  if jax.config.read("jax_enable_x64"):
    raise UserError("JAX_ENABLE_X64 is set, but loopjax trains in 32 bits")
  folder = local_path(options.workdir) if options.workdir else None
  if not folder and not options.config_name:
    raise UserError(
      "--workdir=DIR is missing: where to train a recorded config"
    )
  settings = config_lib.resolve(config, folder)  # Report mistakes first.
  by_user = {*options.overrides, *config_lib.by_user(config)}
  base = naming.workdir(options.config_name, by_user, settings.plain)
  workdir = folder or local_path(base)
  _check_source(mode, options.overrides, workdir)
  place = f"--workdir={workdir}" if options.workdir else "work directory"
  try:
    with command_line.ending_when_full(place):
      summary = _run(options, workdir)
  except (processes.AgreedError, OSError):
    raise
  except processes.ProcessLostError as error:
    _end_alone(error)
  except Exception as error:
    if jax.distributed.is_initialized():
      _end_alone(error)
    if not _is_out_of_memory(error):
      raise
    print_error(_too_little_memory(error))
    return ExitStatus.FAILED
  headline = (*settings.task_module.HEADLINE, *settings.family.headline)
  _say_end(options, summary, headline, zoo.output(workdir))
  return _STATUS[summary["status"]]


def _run(options: Any, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains or scores; returns the summary."""
  import jax

  from loopjax import train
  from loopjax.analysis import figures
  from loopjax.config import presets
  from loopjax.run import processes, zoo
  from loopjax.train import score

  processes.start(
    options.distributed,
    options.coordinator_address,
    options.num_processes,
    options.process_id,
  )
  _check_devices()
  config, name, finish = options.config, options.config_name, figures.finish
  if jax.process_index() == 0:
    print(f"work directory: {zoo.output(workdir)}")
    chosen = f"preset: {presets.choice(name)}" if name else "config: its own"
    print(chosen, flush=True)
  if options.mode == "eval":
    return score.score_model(config, workdir, finish, options.limit)
  return train.run(
    config, workdir, options.mode, finish, options.extend, not options.unchecked
  )


def _say_end(
  options: Any,
  summary: Mapping[str, Any],
  headline: tuple[str, ...],
  workdir: pathlib.Path,
) -> None:
  """Prints the scores, and how to resume what was stopped."""
  import jax

  from loopjax.commands import ending

  is_first = jax.process_index() == 0
  if is_first:
    print(*ending.lines(summary, headline, workdir, options.mode), sep="\n")
  if "reason" in summary:
    print(f"{summary['status']}: {summary['reason']}", file=sys.stderr)
  if summary["status"] == "preempted" and is_first:
    last = options.config.run.num_steps
    where = f"stopped after step {summary['steps']} of {last}"
    again = f"{where}; to resume, run:"
    if options.mode == "eval":
      again = "stopped before all scores were there; to score again, run:"
    print(again, file=sys.stderr)
    print(shlex.join(sys.orig_argv), file=sys.stderr)


def _check_source(
  mode: str, overrides: Mapping[str, Any], workdir: pathlib.Path
) -> None:
  """Raises UserError for a model that cannot be trained, or scored like this.

  Flags cannot change how a run that is scored was trained.
  """
  from loopjax.run import workdir as workdir_lib
  from loopjax.run import zoo

  if mode != "eval":
    zoo.refuse(
      workdir,
      f"`loopjax score {workdir}` scores it,"
      f" --config.run.init_from={workdir} trains it further",
    )
    return
  folder = zoo.located(workdir)
  has_config = (folder / "config.json").exists()
  of_run = workdir_lib.read_config(folder).get("run", {}) if has_config else {}
  for key, value in overrides.items():
    section, _, name = key.partition(".")
    if section == "run" and of_run.get(name, value) != value:
      raise UserError(
        f"--config.{key}={value} has no effect on a trained model; the run has"
        f" {of_run[name]!r}"
      )


def _check_devices() -> None:
  """Raises UserError if JAX finds no devices of the platform that is set."""
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    reason = one_line(error) or "no such device"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    raise UserError(f"JAX_PLATFORMS={platforms}: {reason}") from error


def _is_out_of_memory(error: Exception) -> bool:
  import jax

  is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
  return is_of_jax and "RESOURCE_EXHAUSTED" in str(error)


def _too_little_memory(error: Exception) -> str:
  return (
    f"a device has too little memory ({one_line(error)});"
    " --config.loop.remat=outputs or full keeps less for the backward pass,"
    " --config.run.num_microbatches computes a batch in parts, and"
    " `loopjax fit` says what fits"
  )


def _end_alone(error: Exception) -> NoReturn:
  """Exits immediately: a normal exit would wait for other processes."""
  import jax

  from loopjax.run import processes

  reason, process = one_line(error, 300), f"process {jax.process_index()}"
  if isinstance(error, UserError):
    line, status = f"{process}: {reason}", ExitStatus.MISTAKE
  elif _is_out_of_memory(error):  # Also of what exchanges data.
    line, status = f"{process}: {_too_little_memory(error)}", ExitStatus.FAILED
  elif processes.is_loss(error):
    line, status = f"another process was lost: {reason}", ExitStatus.LOST
  else:
    traceback.print_exception(error)
    line, status = f"{process} failed: {reason}", ExitStatus.FAILED
  print(f"error: {line}", file=sys.stderr, flush=True)
  if status == ExitStatus.LOST:
    time.sleep(_SECONDS_AFTER_A_LOSS)
  os._exit(status)


if __name__ == "__main__":
  leave(main())
