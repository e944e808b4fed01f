"""Which runs can be analysed: those of the task, with the necessary traces."""

import pathlib

from loopjax import config as config_lib
from loopjax.data.multihop import task as task_lib
from loopjax.errors import UserError

# Per-loop traces that a family must have.
_TRACES = ("hidden", "prediction")


def read_settings(workdir: pathlib.Path) -> config_lib.Settings:
  """The settings of a run.

  Raises:
    UserError: there is no run, or it is of another task or of a family without
      the necessary traces.
  """
  settings = config_lib.of_run(workdir, str(workdir))
  if not isinstance(settings.task, task_lib.Config):
    task = settings.plain["task"]["name"]
    raise UserError(f"{workdir}: task.name={task!r} is not 'multihop'")
  if unseen := set(_TRACES).difference(settings.family.TRACES):
    raise UserError(
      f"{workdir}: model.name={settings.model_name!r} does not record "
      f"{', '.join(sorted(unseen))} after every loop"
    )
  return settings


def task_config(settings: config_lib.Settings) -> task_lib.Config:
  """The task section of settings that `read_settings` has checked."""
  assert isinstance(settings.task, task_lib.Config)
  return settings.task
