"""From a config file to checked, typed settings.

A config is an `ml_collections.ConfigDict` with the sections model, task, optim,
loop, mesh, run and eval. Its defaults are the defaults of the dataclasses that
the sections become, so that a name or a type is stated once.
"""

import ast
import dataclasses
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections

from loopjax import checks, optim, sharding
from loopjax.data import TASKS
from loopjax.errors import UserError
from loopjax.loop import driver
from loopjax.models import MODELS
from loopjax.types import LoopOptions


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long and how often.

  Attributes:
    seed: of the parameters, the data order and every other random number.
    num_steps: optimizer steps.
    batch_size: examples per step over all devices.
    steps_per_call: steps that one dispatch runs on the device.
    log_every, checkpoint_every: steps, multiples of steps_per_call.
    keep_checkpoints: how many of the newest are kept.
  """

  seed: int = 0
  num_steps: int = 1000
  batch_size: int = 256
  steps_per_call: int = 10
  log_every: int = 100
  checkpoint_every: int = 1000
  keep_checkpoints: int = 2

  def __post_init__(self) -> None:
    checks.plain_values("run", self)
    names = [field.name for field in dataclasses.fields(self)]
    bounds = {name: 0 if name == "seed" else 1 for name in names}
    checks.at_least("run", self, **bounds)
    if self.checkpoint_every % self.log_every:
      # A resumed run would average the rows in between over fewer steps.
      raise UserError(
        f"run.checkpoint_every={self.checkpoint_every} must be a multiple of"
        f" run.log_every={self.log_every}"
      )
    for name in ("num_steps", "log_every", "checkpoint_every"):
      if getattr(self, name) % self.steps_per_call:
        raise UserError(
          f"run.{name}={getattr(self, name)} must be a multiple of"
          f" run.steps_per_call={self.steps_per_call}"
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """What is scored, and with how many loops.

  Attributes:
    every: steps between evaluations in training; 0 for the final one only.
    batch_size: examples per device call over all devices.
    num_examples: of an evaluation in training, rounded up to whole batches;
      0 for all. The final evaluation always takes all.
    num_loops: 0 for as many as trained with.
    loop_kind: "scan" or "while", which stops when every token has halted.
    checkpoint_step: which checkpoint --mode=eval reads; -1 for the newest.
    depth_factor: the accuracy-against-depth figure goes this many times past
      the trained number of loops; 0 for no such figure.
    depth_examples: examples behind that figure.
  """

  every: int = 0
  batch_size: int = 256
  num_examples: int = 0
  num_loops: int = 0
  loop_kind: str = "scan"
  checkpoint_step: int = -1
  depth_factor: int = 4
  depth_examples: int = 2048

  def __post_init__(self) -> None:
    checks.plain_values("eval", self)
    checks.one_of("eval", self, loop_kind=("scan", "while"))
    checks.at_least(
      "eval",
      self,
      every=0,
      num_examples=0,
      num_loops=0,
      depth_factor=0,
      batch_size=1,
      depth_examples=1,
      checkpoint_step=-1,
    )
    if not self.every:
      checks.without_effect("eval", self, "eval.every=0", "num_examples")


class Settings(NamedTuple):
  """A checked config: the modules it names and one record a section."""

  family: ModuleType
  task_module: ModuleType
  model: Any
  task: Any
  optim: optim.Config
  loop: LoopOptions
  mesh: sharding.Config
  run: RunConfig
  eval: EvalConfig

  @property
  def eval_loops(self) -> int:
    return self.eval.num_loops or self.model.num_loops


def make(model: str, task: str) -> ml_collections.ConfigDict:
  """All sections with their defaults, unlocked.

  Args:
    model: a key of MODELS. task: a key of TASKS.
  """
  sections = {
    "model": {"name": model, **_fields(MODELS[model].Config())},
    "task": {"name": task, **_fields(TASKS[task].Config())},
    "optim": _fields(optim.Config()),
    "loop": _fields(LoopOptions()),
    "mesh": _fields(sharding.Config()),
    "run": _fields(RunConfig()),
    "eval": _fields(EvalConfig()),
  }
  return ml_collections.ConfigDict(sections)


def apply_presets(
  config: ml_collections.ConfigDict,
  arg: str,
  presets: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> ml_collections.ConfigDict:
  """Applies `preset[,section.key=value...]` to a config and locks it.

  Args:
    config: from `make`.
    arg: what stood behind the colon of --config=FILE:arg.
    presets: by name, each {"section": {"key": value}}.

  Raises:
    UserError: no such preset or key, or a value of another type.
  """
  config.lock()
  for part in filter(None, arg.split(",")):
    key, equals, text = part.partition("=")
    if equals:
      override(config, {key: _literal(text)})
    elif part in presets:
      override(config, flatten(presets[part]))
    else:
      raise UserError(
        f"no preset {part!r}; there are {', '.join(sorted(presets))}"
      )
  return config


def override(
  config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> None:
  """Sets "section.key" values in place.

  Raises:
    UserError: an unknown key or a value of another type.
  """
  for key, value in values.items():
    try:
      config.update_from_flattened_dict({key: value})
    except (KeyError, AttributeError, TypeError, ValueError) as error:
      raise UserError(f"{key}={value!r}: {_first_line(error)}") from error


def resolve(config: ml_collections.ConfigDict) -> Settings:
  """Checks a config.

  Raises:
    UserError: an impossible value or combination.
  """
  sections = {name: dict(section) for name, section in config.items()}
  for section, names in (("model", MODELS), ("task", TASKS)):
    name = sections[section].pop("name")
    if name not in names:
      raise UserError(
        f"{section}.name={name!r} is none of {', '.join(sorted(names))}"
      )
  family, task = MODELS[config.model.name], TASKS[config.task.name]
  options = LoopOptions(**sections["loop"])
  # The third kind, "while", has no gradient.
  checks.one_of(
    "loop", options, kind=("scan", "unroll"), remat=driver.REMAT_POLICIES
  )
  settings = Settings(
    family=family,
    task_module=task,
    model=family.Config(**sections["model"]),
    task=task.Config(**sections["task"]),
    optim=optim.Config(**sections["optim"]),
    loop=options,
    mesh=sharding.Config(**sections["mesh"]),
    run=RunConfig(**sections["run"]),
    eval=EvalConfig(**sections["eval"]),
  )
  if settings.eval.every % settings.run.steps_per_call:
    raise UserError(
      f"eval.every={settings.eval.every} must be a multiple of"
      f" run.steps_per_call={settings.run.steps_per_call}"
    )
  optim.make_schedule(settings.optim, settings.run.num_steps)  # Checks both.
  return settings


def to_dict(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Plain nested dict, as it is after a round trip through JSON."""
  return json.loads(config.to_json())


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
  """{"section": {"key": value}} -> {"section.key": value}."""
  return {
    f"{section}.{key}": value
    for section, entries in config.items()
    for key, value in entries.items()
  }


def _fields(record: Any) -> dict[str, Any]:
  return dataclasses.asdict(record)


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _first_line(error: Exception) -> str:
  message = error.args[0] if error.args else error
  return " ".join(str(message).split())
