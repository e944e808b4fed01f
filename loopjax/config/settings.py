"""Converts configs to checked, typed settings.

A config is an `ml_collections.ConfigDict` with the sections model, task, optim,
loop, mesh, run and eval. Its defaults are those of the dataclasses that the
sections become, so each name and type is stated once.
"""

import dataclasses
import difflib
import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from loopjax import checks, sharding
from loopjax.config import run_config
from loopjax.data import TASKS
from loopjax.errors import Mistakes, UserError, similar
from loopjax.kernels import KERNELS
from loopjax.models import CAUSAL, MODELS
from loopjax.nn import remat
from loopjax.optim import chain
from loopjax.protocols import (
  CausalFamily,
  Dataclass,
  Family,
  HasSchedule,
  LearnsFromTeacher,
  LeavesUntrained,
  ModelConfig,
  Task,
)
from loopjax.run import profiling
from loopjax.run import workdir as workdir_lib
from loopjax.sections import flatten
from loopjax.types import LoopOptions, TaskSpec

MAX_LOOPS = 2**16
_NAMES: Mapping[str, Mapping[str, Any]] = {"model": MODELS, "task": TASKS}
_SECTIONS: Mapping[str, Any] = {
  "optim": chain.Config,
  "loop": LoopOptions,
  "mesh": sharding.Config,
  "run": run_config.Run,
  "eval": run_config.Eval,
}


class Settings(NamedTuple):
  """A checked config.

  Attributes:
    plain: the config as stored in config.json.
    family: the module of model.name.
    task_module: the module of task.name.
    spec: the properties of the task that a model depends on.
    model, task, optim, loop, mesh, run, eval: the sections' records.
  """

  plain: Mapping[str, Any]
  family: Family
  task_module: Task
  spec: TaskSpec
  model: ModelConfig
  task: Dataclass
  optim: chain.Config
  loop: LoopOptions
  mesh: sharding.Config
  run: run_config.Run
  eval: run_config.Eval

  @property
  def model_name(self) -> str:
    return self.plain["model"]["name"]

  @property
  def causal(self) -> CausalFamily | None:
    """The family if it predicts next tokens."""
    return CAUSAL.get(self.model_name)

  @property
  def eval_loops(self) -> int:
    return self.eval.num_loops or self.model.num_loops

  @property
  def training_flops(self) -> float:
    """FLOPs of the whole run."""
    costs = self.family.costs(self.model, self.spec, self.model.num_loops)
    examples = self.run.num_steps * self.run.batch_size
    return examples * profiling.training_flops(costs)


class WorkdirOf(NamedTuple):
  """A setting's value in a sweep: the work directory of an earlier item.

  It can be a value of `run.init_from` or `run.teacher`; the item runs only
  after the earlier one is complete.
  """

  item: int


def make(model: str, task: str) -> ml_collections.ConfigDict:
  """All sections with their defaults, unlocked.

  Args:
    model: a key of MODELS. task: a key of TASKS.

  Raises:
    UserError: there is no such model or task.
  """
  _check_name("model", model, MODELS)
  _check_name("task", task, TASKS)
  sections = {
    "model": {"name": model, **_fields(MODELS[model].Config())},
    "task": {"name": task, **_fields(TASKS[task].Config())},
    **{name: _fields(record()) for name, record in _SECTIONS.items()},
  }
  sections["loop"]["remat"] = "auto"
  return ml_collections.ConfigDict(sections)


def override(
  config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> None:
  """Sets "section.key" values in place.

  A new "model.name" or "task.name" replaces the section with the fields of that
  family or task; fields that both have keep their values.

  Raises:
    UserError: a key is unknown, or a value has the wrong type.
  """
  for key, value in values.items():
    if key in ("model.name", "task.name"):
      _switch(config, key.removesuffix(".name"), value)
      continue
    check_key(key, flatten(config))
    try:
      config.update_from_flattened_dict({key: value})
    except (KeyError, AttributeError, TypeError, ValueError) as error:
      raise UserError(f"{key}={value!r}: {_first_line(error)}") from error


def check_key(key: str, known: Mapping[str, Any]) -> None:
  """Raises UserError for an unknown setting, and suggests similar names."""
  if key in known:
    return
  section = f"{key.partition('.')[0]}."
  near = difflib.get_close_matches(key, known, n=3)
  if near:
    raise UserError(f"no setting {key!r}; there is {', '.join(near)}")
  names = [name for name in known if name.startswith(section)]
  names = names or sorted({name.partition(".")[0] for name in known})
  raise UserError(f"no setting {key!r}; there are {', '.join(names)}")


def _switch(config: ml_collections.ConfigDict, section: str, name: Any) -> None:
  """Replaces the section model or task by that of another family or task."""
  if name == config[section].name:
    return
  known = _NAMES[section]
  _check_name(section, name, known)
  fields = {"name": name, **_fields(known[name].Config())}
  old = dict(config[section])
  kept = {key: old[key] for key in fields if key in old and key != "name"}
  with config.unlocked():
    config[section] = ml_collections.ConfigDict({**fields, **kept})


def resolve(config: ml_collections.ConfigDict) -> Settings:
  """Checks a config and converts it to settings.

  Raises:
    UserError: values or combinations are invalid; all of them that can be told
      apart are named, a line each.
  """
  mistakes = Mistakes()
  records: dict[str, Any] = {}
  for name, section in config.items():
    with mistakes.collected():
      records[name] = _record(name, dict(section))
  mistakes.raise_all()
  family, task = MODELS[config.model.name], TASKS[config.task.name]
  if isinstance(family, LeavesUntrained):
    optim = records["optim"]
    patterns = filter(None, (optim.frozen, family.untrained(records["model"])))
    records["optim"] = dataclasses.replace(optim, frozen="|".join(patterns))
  with mistakes.collected():
    records["spec"] = task.spec(records["task"])
  mistakes.raise_all()
  settings = Settings(
    plain=to_dict(config), family=family, task_module=task, **records
  )
  for check in (
    _check_intervals,
    _check_schedules,
    lambda settings: check_loops(
      settings, settings.model.num_loops, "model.num_loops"
    ),
    _check_depths,
    _check_teacher,
  ):
    with mistakes.collected():
      check(settings)
  mistakes.raise_all()
  return settings


def _record(section: str, values: dict[str, Any]) -> Dataclass:
  """The checked record of a section of the config."""
  if section in _NAMES:
    name, names = values.pop("name"), _NAMES[section]
    _check_name(section, name, names)
    if values.keys() != _fields(names[name].Config()).keys():
      raise UserError(
        f"{section}.name={name!r} has other settings and goes after the colon:"
        f" --config=FILE:PRESET,{section}.name={name}"
      )
    return names[name].Config(**values)
  record = _SECTIONS[section](**values)
  if isinstance(record, LoopOptions):
    # The third kind, "while", has no reverse-mode gradient.
    checks.one_of(
      "loop",
      record,
      kind=("scan", "unroll"),
      remat=("auto", *remat.POLICIES),
      kernels=KERNELS,
    )
  return record


def _check_intervals(settings: Settings) -> None:
  """Raises UserError for evaluations or checkpoints at impossible steps."""
  run, every = settings.run, settings.eval.every
  if every % run.steps_per_call:
    raise UserError(
      f"eval.every={every} must be a multiple of"
      f" run.steps_per_call={run.steps_per_call}"
    )
  both = math.lcm(every, run.checkpoint_every)
  if run.keep_best and not 0 < both < run.num_steps:
    raise UserError(
      f"run.keep_best={run.keep_best} needs steps before run.num_steps that are"
      f" evaluated and saved; eval.every={every},"
      f" run.checkpoint_every={run.checkpoint_every}"
    )


def _check_schedules(settings: Settings) -> None:
  """Raises UserError for a schedule that does not fit the run."""
  num_steps = settings.run.num_steps
  chain.make_schedule(settings.optim, num_steps)  # Checks it.
  if isinstance(settings.family, HasSchedule):
    settings.family.check_schedule(settings.model, num_steps)


def _check_teacher(settings: Settings) -> None:
  """Raises UserError for a teacher without effect, or a missing one."""
  family, teacher = settings.family, settings.run.teacher
  if isinstance(family, LearnsFromTeacher):
    if not teacher:
      family.check_teacher(settings.model, settings.spec, None)
  elif teacher:
    raise UserError(
      f"run.teacher={teacher} has no effect:"
      f" model.name={settings.model_name!r} has no teacher"
    )


def _check_depths(settings: Settings) -> None:
  """Raises UserError if evaluation asks for depths the model does not have."""
  for name, times in (
    ("num_loops", 1),
    ("depth_factor", settings.model.num_loops),
  ):
    value = getattr(settings.eval, name)
    check_loops(settings, max(value, 1) * times, f"eval.{name}={value}")


def check_loops(settings: Settings, num_loops: int, label: str) -> None:
  """Raises UserError, with a label, unless the model can run so many loops."""
  if num_loops > MAX_LOOPS:
    raise UserError(f"{label}: {num_loops} loops are more than {MAX_LOOPS:,}")
  try:
    settings.family.costs(settings.model, settings.spec, num_loops)
  except UserError as error:
    raise UserError(f"{label}: {error}") from error


def _check_name(section: str, name: Any, names: Mapping[str, Any]) -> None:
  if name not in names:
    raise UserError(
      f"{section}.name={name!r} is not one of {', '.join(sorted(names))}"
      + similar(name, names)
    )


def axis(key: str, *values: Any) -> list[dict[str, Any]]:
  """The overrides that set one setting to each of the values, for a sweep."""
  return [{key: value} for value in values]


def product(*axes: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Every combination of one override per axis; later axes take precedence."""
  combinations = itertools.product(*axes)
  return [
    {k: v for item in items for k, v in item.items()} for items in combinations
  ]


def to_dict(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Plain nested dict, as after a round trip through JSON."""
  return json.loads(config.to_json())


def of_run(workdir: pathlib.Path, label: str) -> Settings:
  """The settings of a run, from its config.json.

  Args:
    workdir: the run's work directory.
    label: the run's name in messages.

  Raises:
    UserError: there is no run, or it is from an incompatible version.
  """
  path = workdir / "config.json"
  if not path.exists():
    raise UserError(workdir_lib.no_run(workdir, label))
  try:
    there = workdir_lib.read_json(path)
    if "model_type" in there:
      raise UserError(
        "is a folder of the Hub; make a work directory of it with python -m"
        f" loopjax.hub import {workdir} WORKDIR"
      )
    config = make(there["model"]["name"], there["task"]["name"])
    config.lock()
    override(config, flatten(there))
    return resolve(config)
  except UserError as error:
    raise UserError(f"{label}: {error}") from error
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(f"{label}: config.json does not describe a run") from error


def _fields(record: Dataclass) -> dict[str, Any]:
  return dataclasses.asdict(record)


def _first_line(error: Exception) -> str:
  message = error.args[0] if error.args else error
  return " ".join(str(message).split())
