"""Presets: named variants of an experiment, and the argument after the colon.

--config=FILE:[preset][,change...][,import=RUN][,section.key=value...]
"""

import ast
import contextlib
import importlib.metadata
import pathlib
import runpy
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_collections

import loopjax
from loopjax import config as config_lib
from loopjax import sections
from loopjax.config import overrides
from loopjax.errors import UserError, note, similar
from loopjax.models import MODELS

# {"section": {"key": value}}.
Block = Mapping[str, Mapping[str, Any]]

BASE = "paper"  # Applied first; the other presets override its values.
DEFAULT = "tiny"
IMPORT = "import"  # import=RUN: a trained model to start from.
# Settings of a text task that belong to the model.
_VOCABULARY = (
  "tokenizer", "end_token", "begin_token", "add_begin_token", "vocab_size",
)  # fmt: skip


def apply(
  config: ml_collections.ConfigDict,
  arg: str,
  presets: Mapping[str, Block],
  changes: Mapping[str, Block] | None = None,
  source: str = "",
) -> ml_collections.ConfigDict:
  """Applies the paper's values, a preset, changes and overrides; then locks.

  With import=RUN, a run provides the model, its tokenizer and vocabulary,
  and its parameters the first ones (`run.init_from`).

  Args:
    config: from `config.make`.
    arg: the text after the colon of --config=FILE:arg.
    presets: values by preset name, including "tiny", the default. A toy task
      has no "paper".
    changes: values by name of a change, which may follow a preset.
    source: RUN if the argument imports none; "" for no import.
  """
  changes = changes or {}
  chosen = preset_of(arg, presets)
  if chosen not in presets:
    raise UserError(f"PRESETS lacks the default preset {DEFAULT!r}")
  config.lock()
  for name in (BASE, chosen):
    config_lib.override(config, sections.flatten(presets.get(name, {})))
  parts = sections.split(arg)
  imports = [part for part in parts if part.startswith(f"{IMPORT}=")]
  if len(imports) > 1:
    raise UserError(f"{' and '.join(imports)}: choose one")
  for part in imports or ([f"{IMPORT}={source}"] if source else []):
    _import(config, part)
  for part in parts:
    key, equals, text = part.partition("=")
    if key == IMPORT:
      continue
    if equals:
      assign(config, key, text)
    elif part in changes:
      config_lib.override(config, sections.flatten(changes[part]))
    elif part not in presets:
      expected = ", ".join(sorted({*presets, *changes}))
      suggestion = similar(part, {*presets, *changes})
      raise UserError(
        f"unknown preset {part!r}; expected one of {expected}{suggestion}"
      )
  return config


def _import(config: ml_collections.ConfigDict, label: str) -> None:
  """Takes the model of "import=RUN" and its vocabulary into a config.

  The family is that model's, or the config's if such a model can be made from
  it (`Family.made_from`).
  """
  source = label.partition("=")[2]
  run_config = config_lib.config_of_run(pathlib.Path(source), label)
  if not config.task.name == run_config.task.name == "text":
    raise UserError(
      f"{label}: both tasks must be 'text', but this config has"
      f" task.name={config.task.name!r} and the run {run_config.task.name!r}"
    )
  model: Mapping[str, Any] = dict(run_config.model)
  fresh = ""
  made_from = MODELS[config.model.name].made_from
  if made_from and model["name"] != config.model.name:
    try:
      model, fresh = made_from(config_lib.record("model", dict(model)))
    except UserError as error:
      raise UserError(f"{label}: {error}") from error
  # As set by the user: settings of the preset that do not fit are reset.
  name = model.get("name", config.model.name)
  config_lib.override(config, {"model.name": name})
  config_lib.set_by_user(config, {"model.name": name, "run.init_from": source})
  task = {name: run_config.task[name] for name in _VOCABULARY}
  run = {"init_fresh": fresh}
  values = {"model": model, "task": task, "run": run}
  config_lib.override(config, sections.flatten(values))


def preset_of(arg: str, presets: Iterable[str]) -> str:
  """Name of the preset that an argument selects."""
  named = [part for part in sections.split(arg) if part in presets]
  if len(named) > 1:
    raise UserError(
      f"presets {' and '.join(named)} exclude each other; choose one"
    )
  return named[0] if named else DEFAULT


def choice(config_name: str) -> str:
  """The preset that --config=FILE[:arg] selects, and the other choices."""
  path, arg = sections.split_name(config_name)
  names = list(read(path).get("PRESETS", ()))
  if not names:
    return f"none ({path} defines no presets)"
  chosen = preset_of(arg, names)
  others = ", ".join(f":{name}" for name in names if name != chosen)
  return f"{chosen}; others: --config={path}{others} (--list describes them)"


def merged(*blocks: Block) -> dict[str, dict[str, Any]]:
  """Merges blocks; the last one that sets a key wins."""
  result: dict[str, dict[str, Any]] = {}
  for block in blocks:
    for section, values in block.items():
      result[section] = {**result.get(section, {}), **values}
  return result


def steps(config: ml_collections.ConfigDict, part: int, of: int) -> int:
  """A part of a run's steps, rounded down to whole calls, at least one."""
  calls = config.run.num_steps // config.run.steps_per_call
  return max(calls * part // of, 1) * config.run.steps_per_call


def folder() -> pathlib.Path:
  """The folder of the configs, of the checkout or of the installed package."""
  for place in _places(pathlib.Path(loopjax.__file__).parents[1]):
    if (place / "common.py").is_file():
      return place.resolve()
  raise UserError(
    "the configs of loopjax are not installed; pass --config=FILE, or install"
    " it by pip"
  )


def _places(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Where the configs may be; `root` is the folder of the package."""
  yield root / "configs"  # A checkout.
  # `pip install --target=ROOT` puts them here, and records another place.
  yield root / "share/loopjax/configs"
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    for file in importlib.metadata.files("loopjax") or []:
      if file.match("loopjax/configs/common.py"):
        yield pathlib.Path(str(file.locate())).resolve().parent


def located(config_name: str) -> str:
  """--config with the path of its file: `sudoku_utm:nine` is in `folder`.

  If there is no file `configs/sudoku_utm.py`, it is the one in `folder`.
  """
  path_text, _ = sections.split_name(config_name)
  path, rest = pathlib.Path(path_text), config_name.removeprefix(path_text)
  short = path == pathlib.Path(path.stem)
  if not path.exists() and (short or path.parent.name == "configs"):
    candidate = folder() / f"{path.stem}.py"
    if candidate.is_file():
      return f"{candidate}{rest}"
  return config_name


def read(path: str | pathlib.Path) -> dict[str, Any]:
  """The names that a config file defines."""
  return runpy.run_path(str(path))


@contextlib.contextmanager
def running(file: str | pathlib.Path) -> Iterator[None]:
  """Raises UserError, with the line, where the code of a config file fails."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    place = f"{file}, line {lines[-1]}" if lines else file
    said = (str(error).strip() or "no message").splitlines()[-1].strip()
    raise UserError(
      f"--config: {place}: {type(error).__name__}: {said}"
    ) from error


def beside(file: str, name: str) -> dict[str, Any]:
  """The names that another file in a config's folder defines.

  Configs are loaded by path, so they can import only installed packages.

  Args:
    file: the config's `__file__`.
    name: name of the other file, such as "common.py".
  """
  return read(pathlib.Path(file).with_name(name))


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def assign(
  config: ml_collections.ConfigDict, key: str, text: str | None
) -> Any:
  """Sets a setting to what the user's text says.

  Args:
    config: the config, which is changed.
    key: "section.key".
    text: a Python literal; true, false, 1 or 0 for a flag, which None sets.

  Returns:
    The setting's value.
  """
  value: Any = text
  values = sections.flatten(config)
  before = values.get(key)
  if isinstance(before, bool):
    value = True if text is None else _BOOLEANS.get(text.lower(), text)
  elif text is None:
    overrides.check_key(config, key, values)
    raise UserError(f"--config.{key} needs a value")
  elif not isinstance(before, str):
    # `override` raises the error for text of another type.
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(text)
  kept = config_lib.set_by_user(config, {key: value})
  if said := ", ".join(f"{k.partition('.')[2]}={x!r}" for k, x in kept.items()):
    note(f"{key}={value!r} keeps of {before!r}: {said}")
  return sections.flatten(config)[key]
