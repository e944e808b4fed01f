"""Checks configs, also against a stored one, and makes settings of them."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import ml_collections
from flax import nnx

from loopjax import checks, sections
from loopjax.config import sources
from loopjax.config.overrides import (
  NAMES,
  SECTIONS,
  by_user,
  check_name,
  make,
  override,
  to_dict,
)
from loopjax.config.settings import Eval, Settings
from loopjax.data import TASKS
from loopjax.errors import Mistakes, Moot, UserError, note
from loopjax.kernels import KERNELS
from loopjax.loop import starts
from loopjax.models import MODELS
from loopjax.nn import lora, remat
from loopjax.optim import chain, parameters
from loopjax.protocols import Dataclass
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.sections import flatten
from loopjax.types import LoopOptions

# Settings that --extend may change.
_EXTENDED = ("run.batch_size", "run.num_steps")


def check_config(
  workdir: pathlib.Path,
  config: Mapping[str, Any],
  mode: str,
  extend: bool = False,
  label: str = "",
) -> None:
  """Raises UserError if the directory has a run with another config.

  Resuming requires the same value for every setting that affects training,
  unless it extends the run; evaluating, for every setting that the checkpoints
  depend on. A setting that config.json lacks is newer than the run; as in
  `config_of_run`, it has its default there. The message calls the run `label`,
  or by --workdir.
  """
  if not (workdir / "config.json").exists():
    return
  new = sections.flatten(config)
  defaults = to_dict(make(config["model"]["name"], config["task"]["name"]))
  old = sections.flatten(defaults) | sections.flatten(
    workdir_lib.read_config(workdir)
  )
  differing = {
    key: f"{key} ({old.get(key)!r} there, {new.get(key)!r} here)"
    for key in sorted({*old, *new})
    if old.get(key) != new.get(key)
    and workdir_lib.binds(key, mode)
    and not (extend and key in _EXTENDED)
  }
  if differing:
    extends = "; --extend continues it" if {*_EXTENDED} >= {*differing} else ""
    raise UserError(
      f"{label or f'--workdir={workdir}'} contains a run with another"
      " configuration:"
      f" {'; '.join(differing.values())}{extends}"
    )


# Settings of section eval that change the scores at the end of training.
_SCORING = (
  "num_loops", "num_starts", "start_noise", "answer", "certain",
  "execution", "depth_factor", "depth_examples",
)  # fmt: skip


def check_scored(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Raises UserError if a complete run was scored with other settings."""
  before = workdir_lib.read_config(workdir).get("eval", {})
  for name in _SCORING:
    value = config["eval"][name]
    scored = before.get(name, getattr(Eval, name))
    if scored != value:
      raise UserError(
        f"{workdir} is complete, scored with eval.{name}={scored!r}; use"
        f" loopjax score to score it with {value!r}"
      )


MAX_LOOPS = 2**16
# Options of JAX, also by variables of the environment, that change the random
# numbers of a seed.
_RANDOM = {
  "jax_default_prng_impl": "threefry2x32",
  "jax_threefry_partitionable": True,
  "jax_random_seed_offset": 0,
}


def resolve(
  config: ml_collections.ConfigDict, workdir: pathlib.Path | None = None
) -> Settings:
  """Checks a config and converts it to settings.

  A setting that the user's settings make moot is reset in the config, with a
  note on standard error, unless the user set it as well.

  Args:
    config: the config.
    workdir: the work directory of a run that is resumed, if it contains one:
      its tokenizer is the run's own copy if that is the only one left. The
      settings' `plain` then has the path that the config names.
  """
  _check_random_numbers()
  chosen = {*by_user(config)}
  notes: list[str] = []
  while True:
    try:
      settings = _checked(config, chosen, workdir)
      break
    except UserError as error:
      if not (resets := _resets(error.moot, chosen)):
        raise
      for moot in resets:
        notes.append(_note(moot, config))
        override(config, {moot.setting: moot.default})
        chosen.add(moot.setting)  # What it makes moot is reset in turn.
  for text in notes:
    note(text)
  return settings


def _check_random_numbers() -> None:
  """Raises UserError if JAX's options change the random numbers of a seed."""
  for name, expected in _RANDOM.items():
    # An option that JAX no longer has does nothing.
    value = getattr(jax.config, name, expected)
    if value != expected:
      raise UserError(
        f"{name.upper()}={value} changes the random numbers of every seed;"
        f" loopjax needs {expected}, the default"
      )


def _resets(moot: Iterable[Moot], chosen: Set[str]) -> list[Moot]:
  """The moot settings that the user did not choose, though their causes are.

  A family or task that the user chose is a cause for all settings of its
  section. Of several causes, only those that the user chose are named.
  """
  resets = {}
  for entry in moot:
    names = [f"{setting.partition('.')[0]}.name" for setting in entry.because]
    causes = tuple(name for name in entry.because if name in chosen)
    if entry.setting not in chosen and (causes or not chosen.isdisjoint(names)):
      resets[entry.setting] = entry._replace(because=causes or entry.because)
  return list(resets.values())


def _note(moot: Moot, config: ml_collections.ConfigDict) -> str:
  """The message about a moot setting that is reset."""
  values = flatten(config)
  value = values[moot.setting]
  defaults = flatten(make(config.model.name, config.task.name))
  origin = "default" if value == defaults[moot.setting] else "preset's"
  causes = " and ".join(f"{key}={values[key]!r}" for key in moot.because)
  return (
    f"the {origin} {moot.setting}={value!r} does not apply with {causes};"
    f" set to {moot.default!r}"
  )


def _checked(
  config: ml_collections.ConfigDict,
  chosen: Set[str],
  workdir: pathlib.Path | None,
) -> Settings:
  """`resolve` of a config whose settings fit together."""
  mistakes = Mistakes()
  records: dict[str, Any] = {}
  values = {name: dict(section) for name, section in config.items()}
  tokenizer = values["task"].get("tokenizer")
  if tokenizer and workdir and (workdir / "config.json").exists():
    kept = workdir_lib.kept_tokenizer(workdir, tokenizer)
    values["task"]["tokenizer"] = kept
  for name, of_section in values.items():
    with mistakes.collected():
      records[name] = record(name, of_section)
  mistakes.raise_all()
  family, task = MODELS[config.model.name], TASKS[config.task.name]
  if family.untrained:
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
    _check_rates,
    _check_trained,
    _check_depths,
    _check_teacher,
    _check_execution,
    starts.of,
  ):
    with mistakes.collected():
      check(settings)
  if mistakes.found and not _resets(mistakes.moot, chosen):
    with mistakes.collected():
      _parameters(settings)
  mistakes.raise_all()
  return settings


def record(section: str, values: dict[str, Any]) -> Dataclass:
  """The checked record of a section of a config."""
  if section in NAMES:
    name, names = values.pop("name"), NAMES[section]
    check_name(section, name, names)
    if values.keys() != dataclasses.asdict(names[name].Config()).keys():
      raise UserError(
        f"{section}.name={name!r} has other settings, so select it after the "
        f"colon: --config=FILE:PRESET,{section}.name={name}"
      )
    return names[name].Config(**values)
  record = SECTIONS[section](**values)
  if isinstance(record, LoopOptions):
    # "while" has no reverse-mode gradient.
    checks.one_of(
      "loop",
      record,
      execution=("scan", "unroll"),
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
  if run.stop_after and not every:
    raise UserError(
      f"run.stop_after={run.stop_after} has no effect while eval.every=0",
      (Moot("run.stop_after", 0, ("eval.every",)),),
    )
  both = math.lcm(every, run.checkpoint_every)
  if run.keep_best and not 0 < both < run.num_steps:
    raise UserError(
      f"run.keep_best={run.keep_best} needs a step before run.num_steps that "
      f"is both evaluated and saved; eval.every={every}, "
      f"run.checkpoint_every={run.checkpoint_every}"
    )


def _check_rates(settings: Settings) -> None:
  """Raises UserError for phases of training that do not fit the run."""
  if ":" not in settings.optim.schedule:  # Parameters are read without it.
    chain.make_schedule(settings.optim, settings.run.num_steps)  # Checks it.
  try:
    settings.check_schedule()
  except UserError as error:
    if error.moot:  # Others do not matter where a run is read.
      raise


def _check_trained(settings: Settings) -> None:
  """Raises UserError for patterns of section optim that match no parameter."""
  rates, how = settings.optim.rates, settings.optim.adaptation
  # Without the family's own pattern, which may match where the user's does not.
  frozen = settings.plain["optim"]["frozen"]
  if not (rates or how or frozen):
    return
  try:
    params = _parameters(settings)
  except UserError:
    return  # Building the model raises the same error.
  if frozen:
    chain.frozen_mask(params, frozen)  # Checks it.
  if how:
    key = jax.random.key(0)
    _, params = jax.eval_shape(lambda x: lora.split(x, how, key), params)
  unused = parameters.unused_rates(rates, params)
  if unused:
    used = tuple(rate for rate in rates if rate not in unused)
    causes = (
      *(f"model.{x}" for x in settings.plain["model"]),
      "optim.lora_rank",
    )
    raise UserError(
      f"optim.rates: {unused[0]!r} applies to no parameter of this model",
      (Moot("optim.rates", used, causes),),
    )


def _parameters(settings: Settings) -> Any:
  """The model's parameters, abstract, as a nested dict."""

  def make() -> Any:
    rngs = nnx.Rngs(params=jax.random.key(0))
    return settings.family.Model(
      settings.model, settings.spec, settings.loop, rngs=rngs
    )

  return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))


def _check_teacher(settings: Settings) -> None:
  """Raises UserError for a teacher without effect, or a missing one."""
  family, teacher = settings.family, settings.run.teacher
  if family.check_teacher:
    if not teacher:
      family.check_teacher(settings.model, None)
  elif teacher:
    raise UserError(
      f"run.teacher={teacher} has no effect:"
      f" model.name={settings.model_name!r} has no teacher"
    )


def _check_execution(settings: Settings) -> None:
  """Raises UserError if nothing could end the loops of an evaluation."""
  family = settings.family
  rule = family.halting_rule and family.halting_rule(settings.model)
  stops = family.halting_trace or rule not in (None, "fixed")
  if settings.eval.execution == "while" and not stops:
    raise UserError(
      f"eval.execution='while' has no effect: no token halts in this model of"
      f" model.name={settings.model_name!r}",
      (Moot("eval.execution", "scan", ("model.name", "model.halting")),),
    )


def _check_depths(settings: Settings) -> None:
  """Raises UserError for depths, of training or evaluation, that cannot be."""
  trained, evaluation = settings.model.num_loops, settings.eval
  check_loops(settings, trained, "model.num_loops")  # The others' costs, too.
  for name, times in (("num_loops", 1), ("depth_factor", trained)):
    value = getattr(evaluation, name)
    try:
      check_loops(settings, max(value, 1) * times, f"eval.{name}={value}")
    except UserError as error:
      moot = Moot(f"eval.{name}", 0, ("model.name",))
      raise UserError(str(error), (*error.moot, moot)) from error


def check_loops(settings: Settings, num_loops: int, label: str) -> None:
  """Raises UserError, with a label, unless the model can run these loops."""
  if num_loops > MAX_LOOPS:
    raise UserError(
      f"{label}: {num_loops} loops exceed the maximum of {MAX_LOOPS:,}"
    )
  try:
    costs = settings.family.costs(settings.model, settings.spec, num_loops)
  except UserError as error:
    raise UserError(f"{label}: {error}", error.moot) from error
  length = len(costs.get("flops_per_example", ()))
  if length != num_loops:
    raise UserError(
      f"{label}: costs of model.name={settings.model_name!r}: the length of"
      f" flops_per_example is {length}; expected {num_loops}, a number per loop"
    )


def of_run(workdir: pathlib.Path, label: str) -> Settings:
  """The settings of a run, from its config.json; see `config_of_run`."""
  config = config_of_run(workdir, label)
  try:
    return resolve(config)
  except UserError as error:
    raise UserError(f"{label}: {error}") from error


def of_record(recorded: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """The config, locked, that was written as plain data."""
  config = make(recorded["model"]["name"], recorded["task"]["name"])
  config.lock()
  override(config, flatten(recorded))
  return config


def config_of_run(
  workdir: pathlib.Path, label: str
) -> ml_collections.ConfigDict:
  """The config of a run, from its config.json, locked.

  Its tokenizer is the run's own copy if that is the only one left.

  Args:
    workdir: the run's work directory, or zoo:NAME.
    label: the run's name in messages.
  """
  path = zoo.located(workdir) / "config.json"
  if not path.exists():
    raise UserError(workdir_lib.no_run(workdir, label))
  try:
    recorded = workdir_lib.read_json(path)
    if "model_type" in recorded:
      raise UserError(
        "is a Hugging Face Hub folder; import it with loopjax hub "
        f"import {workdir} RUN"
      )
    config = of_record(recorded)
    if tokenizer := config.task.get("tokenizer"):
      config.task.tokenizer = workdir_lib.kept_tokenizer(path.parent, tokenizer)
    sources.compare(path.parent, recorded)
    return config
  except UserError as error:
    raise UserError(f"{label}: {error}") from error
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(
      f"{label}: config.json is not a loopjax run's config"
    ) from error
