"""Configs with all their sections, and changes of their values.

A config is an `ml_collections.ConfigDict` with the sections model, task, optim,
loop, mesh, run and eval. Its defaults come from the dataclasses that the
sections become, so each name and type is stated once.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from loopjax import checks, sections, sharding
from loopjax.config import settings
from loopjax.data import TASKS
from loopjax.errors import UserError, similar
from loopjax.models import MODELS
from loopjax.optim import chain
from loopjax.protocols import Registry
from loopjax.types import LoopOptions

NAMES: Mapping[str, Registry[Any]] = {"model": MODELS, "task": TASKS}

# Types of settings in messages.
_KINDS = {
  bool: "True or False", int: "an integer", float: "a number",
  str: "a string", tuple: "a tuple",
}  # fmt: skip

SECTIONS: Mapping[str, Any] = {
  "optim": chain.Config,
  "loop": LoopOptions,
  "mesh": sharding.Config,
  "run": settings.Run,
  "eval": settings.Eval,
}


class Config(ml_collections.ConfigDict):
  """A config that remembers which settings the user set.

  `by_user` has their names. They are not among its values: config.json lacks
  them.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    object.__setattr__(self, "by_user", set())
    super().__init__(*args, **kwargs)

  def __setstate__(self, state: dict[str, Any]) -> None:  # Of a deep copy.
    super().__setstate__(state)
    self.by_user.update(state["by_user"])

  def copy_and_resolve_references(self, visit_map: Any = None) -> "Config":
    """A copy, see `ml_collections.ConfigDict`."""
    copied = super().copy_and_resolve_references(visit_map)
    copied.by_user.update(self.by_user)
    return copied


class WorkdirOf(NamedTuple):
  """A setting's value in a sweep: the work directory of an earlier item.

  It can be a value of `run.init_from` or `run.teacher`; the item runs only
  after the earlier one is complete.
  """

  item: int


def make(model: str, task: str) -> ml_collections.ConfigDict:
  """All sections with their defaults, unlocked.

  Args:
    model: a key of MODELS, or the import path of a family from outside.
    task: a key of TASKS, or the import path of a task.
  """
  check_name("model", model, MODELS)
  check_name("task", task, TASKS)
  values = {
    "model": {"name": model, **dataclasses.asdict(MODELS[model].Config())},
    "task": {"name": task, **dataclasses.asdict(TASKS[task].Config())},
    **{name: dataclasses.asdict(record()) for name, record in SECTIONS.items()},
  }
  values["loop"]["remat"] = "auto"
  return Config(values)


def by_user(config: ml_collections.ConfigDict) -> frozenset[str]:
  """The "section.key" that the user set; the others are of a preset."""
  return (
    frozenset(config.by_user) if isinstance(config, Config) else frozenset()
  )


def set_by_user(
  config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> dict[str, Any]:
  """`override` with the values of a user, who is told which have no effect.

  Where they make another setting moot, `resolve` resets that one.
  """
  kept = override(config, values)
  if isinstance(config, Config):
    config.by_user.update(values)
  return kept


def override(
  config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> dict[str, Any]:
  """Sets "section.key" values in place.

  A new "model.name" or "task.name" replaces the section with the fields of that
  family or task. Fields keep their values if both mean the same by them, see
  `checks.setting`.

  Returns:
    What other values than their defaults a new family or task keeps.
  """
  # Once: a ConfigDict takes long to iterate over.
  settings_by_name, kept = sections.flatten(config), dict[str, Any]()
  for key, given in values.items():
    value = given.item() if isinstance(given, np.generic) else given
    if key in ("model.name", "task.name"):
      kept |= _switch(config, key.removesuffix(".name"), value)
      settings_by_name = sections.flatten(config)
      continue
    check_key(config, key, settings_by_name)
    try:
      config.update_from_flattened_dict({key: value})
    except TypeError as error:
      kind = type(settings_by_name[key])
      expected = _KINDS.get(kind, f"of type {kind.__name__}")
      raise UserError(f"{key}={value!r} must be {expected}") from error
    except (KeyError, AttributeError, ValueError) as error:
      message = " ".join(str(error.args[0]).split())  # A KeyError is quoted.
      raise UserError(f"{key}={value!r}: {message}") from error
  return {key: value for key, value in kept.items() if key not in values}


def _switch(
  config: ml_collections.ConfigDict, section: str, name: Any
) -> dict[str, Any]:
  """Replaces the section model or task by that of another family or task.

  Returns the values by "section.key" that are not the new one's default: those
  of settings that both have and mean the same by.
  """
  if name == config[section].name:
    return {}
  registry, old = NAMES[section], dict(config[section])
  check_name(section, name, registry)
  before, after = registry[old["name"]].Config, registry[name].Config
  fields = dataclasses.asdict(after())
  own = {x.name for of in (before, after) for x in dataclasses.fields(of)
         if checks.setting_of(of, x.name).get("own")}  # fmt: skip
  shared = {k: old[k] for k in fields if k in old and k not in own}
  with config.unlocked():
    config[section] = ml_collections.ConfigDict(
      {"name": name, **fields, **shared}
    )
  return {f"{section}.{k}": x for k, x in shared.items() if x != fields[k]}


def check_key(
  config: ml_collections.ConfigDict, key: str, known: Mapping[str, Any]
) -> None:
  """`sections.check_key` that knows the settings of other families and tasks.

  A preset may have another task than the others of its config file.
  """
  section, _, field = key.partition(".")
  if key not in known and section in NAMES:
    having = [
      name
      for name, entry in NAMES[section].items()
      if field in {x.name for x in dataclasses.fields(entry.Config)}
    ]
    if having:
      raise UserError(
        f"unknown setting {key!r}: {section}.name={config[section].name!r} does"
        f" not have it, only {', '.join(having)}"
      )
  sections.check_key(key, known)


def check_name(section: str, name: Any, names: Mapping[str, Any]) -> None:
  """Raises UserError unless the name of a model or task is known."""
  if name not in names:
    raise UserError(
      f"{section}.name={name!r} is not one of {', '.join(sorted(names))}"
      + (similar(name, names) or ", nor a module that can be imported; to add")
      + ("" if similar(name, names) else f" one: docs/howto/{section}.md")
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
