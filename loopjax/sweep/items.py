"""The items of a named sweep: their overrides and directories."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from loopjax import config as config_lib
from loopjax import sections
from loopjax.config import presets
from loopjax.errors import UserError, similar, writing
from loopjax.run import naming
from loopjax.run import workdir as workdir_lib


class SweepItem(NamedTuple):
  """One run of a sweep.

  Attributes:
    overrides: {"section.key": value} applied to the config.
    config: the resolved config, as plain data.
    slug: name of its directory in the sweep's; equal for equal experiments.
    needs: slugs of the earlier items whose runs it starts from.
  """

  overrides: dict[str, Any]
  config: dict[str, Any]
  slug: str
  needs: tuple[str, ...]


def make_items(
  config: ml_collections.ConfigDict,
  sweeps: Any,
  name: str,
  common: Mapping[str, Any],
  workdir: pathlib.Path = pathlib.Path(),
) -> list[SweepItem]:
  """The items of a sweep, all checked before any of them runs.

  Args:
    config: the config, with the command line's overrides.
    sweeps: the config file's `sweeps` function.
    name: name of the sweep.
    common: the command line's overrides.
    workdir: the sweep's work directory, which contains the runs of earlier
      items. An item that a sweep-*.json there has keeps its directory.
  """
  there_are = sweeps(config)
  if name not in there_are:
    raise UserError(
      f"--sweep={name}: no such sweep; expected one of"
      f" {', '.join(sorted(there_are))}" + similar(name, there_are)
    )
  base = config_lib.to_dict(config)
  varied = sections.differing(list(there_are[name]))
  earlier_items = _known(workdir, name)
  items: list[SweepItem] = []
  for item_overrides in there_are[name]:
    earlier = _earlier(name, item_overrides, items)
    workdirs = {key: str(workdir / name) for key, name in earlier.items()}
    overrides = {**item_overrides, **workdirs}
    if clash := sorted(set(common) & set(overrides)):
      raise UserError(
        f"--config.{clash[0]} has no effect: sweep {name} sets it"
      )
    changed = config.copy_and_resolve_references()
    changed.lock()
    try:
      config_lib.set_by_user(changed, overrides)
      values = sections.flatten(changed)  # Not NumPy's numbers.
      overrides = {key: values[key] for key in overrides}
      settings = config_lib.resolve(changed)
      settings.check_run("train_and_eval")
      settings.check_schedule()
    except UserError as error:
      raise UserError(f"sweep {name}, item {overrides}: {error}") from error
    plain = settings.plain
    directory = _directory(earlier_items, name, plain, overrides, earlier)
    if not directory:
      directory = slug(base, plain, overrides, earlier, varied)
    _check_scores(workdir / directory, plain)
    needs = tuple(dict.fromkeys(earlier.values()))
    items.append(SweepItem(overrides, dict(plain), directory, needs))
    earlier_items.append(_Known("", {}, dict(plain), directory))
  return items


def _check_scores(directory: pathlib.Path, plain: Mapping[str, Any]) -> None:
  """Raises UserError for an item that was scored with other settings.

  The sweep's plan would say of its scores what they are not.
  """
  try:
    status = workdir_lib.read_summary(directory)["status"]
  except UserError:
    return  # There is none, or the item's run says what is wrong.
  if status == "completed":
    config_lib.check_scored(directory, plain)


def _earlier(
  name: str, overrides: Mapping[str, Any], items: Sequence[SweepItem]
) -> dict[str, str]:
  """The slug of the item to which each WorkdirOf of the overrides refers."""
  found = {}
  for key, value in overrides.items():
    if isinstance(value, config_lib.WorkdirOf):
      if value.item not in range(len(items)):
        raise UserError(
          f"sweep {name}, item {len(items)}: {key}={value} is not an earlier"
          " item; they are counted from 0"
        )
      found[key] = items[value.item].slug
  return found


class _Known(NamedTuple):
  """An item that has a directory: of a sweep-NAME.json, or an earlier one.

  Attributes:
    sweep: NAME; "" for an earlier item.
    overrides: as in the file.
    config: its resolved config.
    directory: name of its directory.
  """

  sweep: str
  overrides: Mapping[str, Any]
  config: Mapping[str, Any]
  directory: str


def _known(workdir: pathlib.Path, name: str) -> list[_Known]:
  """The items of the sweeps that were started in a directory, ours first."""
  items = []
  ours = workdir / f"sweep-{name}.json"
  paths = sorted(workdir.glob("sweep-*.json"), key=lambda x: (x != ours, x))
  for path in paths:
    manifest = workdir_lib.read_json(path)
    try:
      items += [
        _Known(
          manifest["sweep"],
          dict(item["overrides"]),
          item["config"],
          item["directory"],
        )
        for item in manifest["items"]
      ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(f"{path}: is not a list of runs: {error!r}") from error
  return items


def _directory(
  earlier_items: Sequence[_Known],
  name: str,
  config: Mapping[str, Any],
  overrides: Mapping[str, Any],
  earlier: Mapping[str, str],
) -> str:
  """The directory that an item has already, or "".

  First by what the item sets, whatever its directory was called; then by its
  config, for experiments that two sweeps, or two items, have in common.
  """
  as_json = json.loads(json.dumps({**overrides, **earlier}))
  for one in earlier_items:
    paths = {
      key: pathlib.Path(str(one.overrides.get(key, ""))).name for key in earlier
    }
    if one.sweep == name and {**one.overrides, **paths} == as_json:
      return one.directory
  for one in earlier_items:
    if one.config == config:
      return one.directory
  return ""


def slug(
  base: Mapping[str, Any],
  changed: Mapping[str, Any],
  keys: Iterable[str],
  earlier: Mapping[str, str] = {},
  varied: Collection[str] = (),
) -> str:
  """A directory name for an item's changes: `num_memory_tokens=8,seed=42`.

  It has the settings that the sweep varies, the others that differ from the
  base, and the seed. Different changes of the same base have different names.

  Args:
    base: config without the item's overrides, as plain data.
    changed: config with the item's overrides.
    keys: "section.key" of the settings that the item sets.
    earlier: the name of the earlier run to which each setting's path refers; a
      digest of the name replaces the path.
    varied: the settings in which the sweep's items differ.
  """
  before, after = sections.flatten(base), sections.flatten(changed)
  for key, name in earlier.items():
    after[key] = hashlib.sha256(name.encode()).hexdigest()[:8]
  named = {"run.seed", *varied}
  named_keys = [k for k in keys if before.get(k) != after[k] or k in named]
  return naming.settings(named_keys, after) or "base"


def write_manifest(
  workdir: pathlib.Path,
  name: str,
  config_name: str,
  common: Mapping[str, Any],
  items: Sequence[SweepItem],
) -> None:
  """Writes sweep-NAME.json, the plan of the sweep, for the report."""
  manifest = {
    "sweep": name,
    "config": config_name,
    "overrides": dict(common),
    "task": items[0].config["task"]["name"] if items else "",
    "items": [
      {
        "overrides": item.overrides,
        "directory": item.slug,
        "config": item.config,
      }
      for item in items
    ],
  }
  with writing(f"--workdir={workdir}"):
    workdir.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_json(workdir / f"sweep-{name}.json", manifest)


def load_sweeps(config_name: str) -> Any:
  """The `sweeps` function of a config file."""
  path, _ = sections.split_name(config_name)
  sweeps = presets.read(path).get("sweeps")
  if sweeps is None:
    raise UserError(f"--config={path} defines no sweeps")
  return functools.partial(_sweeps, path, sweeps)


def _sweeps(
  path: str, sweeps: Any, config: ml_collections.ConfigDict
) -> Mapping[str, Sequence[Mapping[str, Any]]]:
  """What the `sweeps` function of a config file returns, checked."""
  with presets.running(path):
    try:
      there_are = sweeps(config)
    except AttributeError as error:  # A setting of another family.
      if not isinstance(error.obj, ml_collections.ConfigDict):
        raise
      lacks = " ".join(str(error).split()).strip("\"'")
      raise UserError(
        f"--config={path}: its sweeps do not support"
        f" model.name={config.model.name!r}, which lacks {lacks}"
      ) from error
  named = there_are.items() if isinstance(there_are, Mapping) else [("", None)]
  for name, items in named:
    if not isinstance(items, list | tuple) or not all(
      isinstance(item, Mapping) for item in items
    ):
      what = f"sweep {name} is" if name else "sweeps returns"
      raise UserError(
        f"--config={path}: {what} not as in docs/howto/sweep.md: lists of"
        " overrides, {'section.key': value}, by name"
      )
  return there_are
