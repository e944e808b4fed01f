"""Which runs can be analysed: those of the task, with the necessary traces."""

import pathlib

from loopjax import config as config_lib
from loopjax.data.multihop import task as task_lib
from loopjax.errors import UserError

TASK = "multihop"
# Per-loop traces that a family must have.
_TRACES = ("hidden", "prediction")


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
  family = settings.model_name
  if task != TASK:
    raise UserError(f"{workdir}: task.name={task!r} is not {TASK!r}")
  if unseen := set(_TRACES).difference(settings.family.TRACES):
    raise UserError(
      f"{workdir}: model.name={family!r} does not show the"
      f" {', '.join(sorted(unseen))} of every loop"
    )
  return settings, family


def task_config(settings: config_lib.Settings) -> task_lib.Config:
  """The task section of settings that `read_settings` has checked."""
  assert isinstance(settings.task, task_lib.Config)
  return settings.task
