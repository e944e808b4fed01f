"""Trains and evaluates a model.

  python -m loopjax.main --config=FILE[:preset][,section.key=value...]

The default preset is :tiny; --list shows the configs and their presets. The
same command resumes a run that was stopped. --config.section.key=value changes
a setting, --workdir=DIR sets where the run writes, and --mode=describe prints
sizes, costs and settings.

Exit status: 0 completed, 1 failed, 2 a mistake by the user, 3 training
diverged, 4 preempted (the run saved a checkpoint and stopped on request), 5
another process of the run was lost. After 4 and 5 the same command resumes the
run.
"""

import json
import os
import pathlib
import shlex
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
from absl import flags

from loopjax.commands import command_line
from loopjax.errors import UserError, local_path, one_line
from loopjax.run import processes
from loopjax.run import workdir as workdir_lib

_STATUS = {"completed": 0, "diverged": 3, "preempted": 4}
_LOST = 5
MODES = ("train", "eval", "train_and_eval", "describe", "describe_json")

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
flags.adopt_module_key_flags(processes)
_MODE = flags.DEFINE_enum(
  "mode",
  "train_and_eval",
  MODES,
  "What to do; describe prints sizes and costs, describe_json for programs.",
)
_LIST = flags.DEFINE_bool("list", False, "List the configs and their presets.")


def main(argv: list[str]) -> int:
  """Runs the command that --mode names; returns the exit status."""
  del argv
  from loopjax import config as config_lib
  from loopjax import train
  from loopjax.analysis import figures
  from loopjax.commands import describe, ending, listing
  from loopjax.config import presets
  from loopjax.run import naming, user_cache, zoo

  user_cache.keep_compiled()
  config = command_line.CONFIG.value
  if _LIST.value:
    print(listing.listing())
    return 0
  if config is None:
    raise UserError("--config=FILE is missing; --list shows the choices")
  if jax.config.read("jax_enable_x64"):
    raise UserError("JAX_ENABLE_X64 is set, but runs compute in 32 bits")
  if _MODE.value == "describe":
    print(describe.page(describe.describe(config)))
    return 0
  if _MODE.value == "describe_json":
    print(json.dumps(describe.describe(config), indent=2))
    return 0
  settings = config_lib.resolve(config)  # Report mistakes first.
  plain = settings.plain
  config_name, overrides = command_line.config_name(), command_line.overrides()
  default = naming.workdir(config_name, overrides, plain)
  workdir = local_path(command_line.WORKDIR.value or default)
  zoo.refuse(
    workdir,
    "`loopjax zoo score NAME` scores it,"
    f" --config.run.init_from={workdir} trains it further",
  )
  if _MODE.value == "eval":
    _check_overrides(overrides, workdir)
  try:
    processes.start()
    _check_devices()
    if jax.process_index() == 0:
      print(f"work directory: {workdir}")
      print(f"preset: {presets.choice(config_name)}", flush=True)
    summary = train.run(config, workdir, _MODE.value, figures.finish)
  except (processes.AgreedError, OSError):
    raise
  except processes.ProcessLostError as error:
    _end_alone(error)
  except Exception as error:
    if not jax.distributed.is_initialized():
      raise
    _end_alone(error)
  if jax.process_index() == 0:
    headline = (*settings.task_module.HEADLINE, *settings.family.HEADLINE)
    print(*ending.lines(summary, headline, workdir, _MODE.value), sep="\n")
  if "reason" in summary:
    print(f"{summary['status']}: {summary['reason']}", file=sys.stderr)
  if summary["status"] == "preempted" and jax.process_index() == 0:
    where = f"stopped after step {summary['steps']} of {config.run.num_steps}"
    print(f"{where}; to resume, run:", file=sys.stderr)
    print(shlex.join(sys.orig_argv), file=sys.stderr)
  return _STATUS[summary["status"]]


def _check_overrides(
  overrides: Mapping[str, Any], workdir: pathlib.Path
) -> None:
  """Raises UserError for flags that change how the run was trained."""
  there = (workdir / "config.json").exists()
  of_run = workdir_lib.read_config(workdir).get("run", {}) if there else {}
  for key, value in overrides.items():
    section, _, name = key.partition(".")
    if section == "run" and of_run.get(name, value) != value:
      raise UserError(
        f"--config.{key}={value} has no effect with --mode=eval; the run has"
        f" {of_run[name]!r}"
      )


def _check_devices() -> None:
  """Raises UserError if JAX finds no devices of the platform that is set."""
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    said = one_line(error) or "no such device"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    raise UserError(f"JAX_PLATFORMS={platforms}: {said}") from error


def _end_alone(error: Exception) -> NoReturn:
  """Exits immediately: a normal exit would wait for other processes."""
  reason = " ".join(str(error).split())[:300]
  from_jax = isinstance(error, jax.errors.JaxRuntimeError)
  out_of_memory = from_jax and "RESOURCE_EXHAUSTED" in reason
  if isinstance(error, processes.ProcessLostError) or (
    from_jax and not out_of_memory
  ):
    line, status = f"another process was lost: {reason}", _LOST
  elif isinstance(error, UserError):
    line, status = f"process {jax.process_index()}: {reason}", 2
  else:
    traceback.print_exception(error)
    line, status = f"process {jax.process_index()} failed: {reason}", 1
  print(f"error: {line}", file=sys.stderr, flush=True)
  os._exit(status)


if __name__ == "__main__":
  command_line.run(main)
