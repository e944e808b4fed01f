"""Reads what is analysed from a work directory: settings, parameters, step."""

import pathlib
from typing import Any, NamedTuple

import jax
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data.multihop import task as task_lib
from loopjax.errors import UserError
from loopjax.run import restore as restore_lib

TASK = "multihop"
# Per-loop traces that a family must have.
_TRACES = ("hidden", "prediction")


class Restored(NamedTuple):
  """A run at its newest checkpoint.

  Attributes:
    settings: of the run, except the mesh, which is one device.
    family: its name.
    graphdef: the model without its parameters.
    params: the scored ones of the newest intact checkpoint.
    step: optimizer steps of this checkpoint.
  """

  settings: config_lib.Settings
  family: str
  graphdef: nnx.GraphDef
  params: Any
  step: int


def read_settings(
  workdir: pathlib.Path,
) -> tuple[config_lib.Settings, str]:
  """The settings of a run and the name of its family.

  Raises:
    UserError: there is no run, or it is of another task or of a family without
      the necessary traces.
  """
  settings = config_lib.of_run(workdir, str(workdir))
  task = settings.plain["task"]["name"]
  family = settings.plain["model"]["name"]
  if task != TASK:
    raise UserError(f"{workdir}: task.name={task!r} is not {TASK!r}")
  if unseen := set(_TRACES).difference(settings.family.TRACES):
    raise UserError(
      f"{workdir}: model.name={family!r} does not show the"
      f" {', '.join(sorted(unseen))} of every loop"
    )
  return settings._replace(mesh=sharding.Config()), family


def task_config(settings: config_lib.Settings) -> task_lib.Config:
  """The section task, whose type `read_settings` has checked."""
  assert isinstance(settings.task, task_lib.Config)
  return settings.task


def restore(
  workdir: pathlib.Path, settings: config_lib.Settings, family: str
) -> Restored:
  """Reads the newest intact checkpoint; its run may be in progress.

  Args:
    workdir: of the run.
    settings: from `read_settings`, as is `family`.
    family: its name.

  Raises:
    UserError: there is none.
  """
  program = program_lib.make_program(settings, jax.local_devices()[:1])
  step, params = restore_lib.chosen_params(
    workdir, None, program.abstract_state.params, str(workdir)
  )
  return Restored(settings, family, program.graphdef, params, step)
