"""The run that another one learns from: its model stays as it is.

`run.teacher` names a work directory of any family. Its config.json says what
model it is; its newest checkpoint holds the parameters, averaged ones if the
run averages.
"""

import pathlib
from typing import Any, NamedTuple

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.protocols import LearnsFromTeacher
from loopjax.run import restore


class Loaded(NamedTuple):
  """Parameters that training reads and never changes.

  Attributes:
    params: of the teacher, nested dict; {} without one.
    step: of the checkpoint that they come from; None without one.
  """

  params: Any
  step: int | None


def read(settings: config_lib.Settings) -> config_lib.Settings | None:
  """The teacher's settings; None if the run has no teacher.

  Args:
    settings: of the run that learns.

  Raises:
    UserError: run.teacher is no work directory, or of a model that this one
      cannot learn from.
  """
  if not settings.run.teacher:
    return None
  label = _label(settings)
  teacher = config_lib.of_run(pathlib.Path(settings.run.teacher), label)
  ours, theirs = settings.spec, teacher.spec
  if ours.vocab_size != theirs.vocab_size:
    raise UserError(
      f"{label} reads {theirs.vocab_size} token ids, the task has"
      f" {ours.vocab_size}"
    )
  family = settings.family
  assert isinstance(family, LearnsFromTeacher)  # `config.resolve` has seen it.
  try:
    family.check_teacher(settings.model, ours, teacher)
  except UserError as error:
    raise UserError(f"{label}: {error}") from error
  return teacher


def load(
  settings: config_lib.Settings, abstract_frozen: Any, step: int | None
) -> Loaded:
  """The teacher's parameters, laid out over the mesh.

  Args:
    settings: of the run that learns.
    abstract_frozen: of its program; {} if it has no teacher.
    step: of the checkpoint that the run has begun with; None if it begins now.
      The teacher's run may have gone on since then.

  Raises:
    UserError: there is no such checkpoint.
  """
  if not abstract_frozen:
    return Loaded({}, None)
  source = pathlib.Path(settings.run.teacher)
  at, params = restore.chosen_params(
    source, step, abstract_frozen, _label(settings)
  )
  return Loaded(params, at)


def _label(settings: config_lib.Settings) -> str:
  return f"run.teacher={settings.run.teacher}"
