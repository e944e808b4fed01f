"""The teacher: a frozen model from an earlier run, for distillation.

`run.teacher` names a work directory of any family. Its config.json describes
the model; its newest checkpoint holds the parameters; their average is used if
the run keeps one.
"""

from typing import Any

from loopjax import config as config_lib
from loopjax.errors import UserError, local_path
from loopjax.run.checkpoints import restore


def read(settings: config_lib.Settings) -> config_lib.Settings | None:
  """The teacher's settings; None if the run has no teacher."""
  if not settings.run.teacher:
    return None
  label = _label(settings)
  teacher = config_lib.of_run(local_path(settings.run.teacher), label)
  ids, teacher_ids = settings.spec.vocab_size, teacher.spec.vocab_size
  if ids != teacher_ids:
    raise UserError(
      f"{label} has {teacher_ids} token ids, but the task has {ids}"
    )
  check = settings.family.check_teacher
  assert check is not None  # Checked by `config.resolve`.
  try:
    check(settings.model, teacher)
  except UserError as error:
    raise UserError(f"{label}: {error}") from error
  return teacher


def load(
  settings: config_lib.Settings, abstract_teacher: Any, step: int | None
) -> tuple[int | None, Any]:
  """The step and the parameters of a checkpoint; (None, {}) without a teacher.

  The step is given if the run began with it, as the teacher's run may have
  continued since; None stands for the newest.
  """
  if not abstract_teacher:
    return None, {}
  source = local_path(settings.run.teacher)
  return restore.chosen_params(source, step, abstract_teacher, _label(settings))


def _label(settings: config_lib.Settings) -> str:
  return f"run.teacher={settings.run.teacher}"
