"""The items of a named sweep: their overrides and directories."""

import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
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
    slug: name of its directory; equal for equal experiments.
    needs: slugs of the earlier items whose runs it starts from.
  """

  overrides: dict[str, Any]
  config: dict[str, Any]
  slug: str
  needs: tuple[str, ...] = ()


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
      items.

  Raises:
    UserError: the sweep does not exist, or an item is invalid with this config.
  """
  try:
    there_are = sweeps(config)
  except AttributeError as error:  # A setting of another family.
    if not isinstance(error.obj, ml_collections.ConfigDict):
      raise
    lacks = " ".join(str(error).split()).strip("\"'")
    raise UserError(
      f"--sweep={name}: this config's sweeps do not support"
      f" model.name={config.model.name!r}, which lacks {lacks}"
    ) from error
  if name not in there_are:
    raise UserError(
      f"--sweep={name}: no such sweep; expected one of"
      f" {', '.join(sorted(there_are))}" + similar(name, there_are)
    )
  base = config_lib.to_dict(config)
  items: list[SweepItem] = []
  for wanted in there_are[name]:
    earlier = {
      key: items[value.item].slug
      for key, value in wanted.items()
      if isinstance(value, config_lib.WorkdirOf)
    }
    found = {key: str(workdir / name) for key, name in earlier.items()}
    overrides = {**wanted, **found}
    if clash := sorted(set(common) & set(overrides)):
      raise UserError(
        f"--config.{clash[0]} has no effect: sweep {name} sets it"
      )
    changed = config.copy_and_resolve_references()
    changed.lock()
    try:
      overrides = config_lib.set_by_user(changed, overrides)
      plain = config_lib.resolve(changed).plain
    except UserError as error:
      raise UserError(f"sweep {name}, item {overrides}: {error}") from error
    directory = slug(base, plain, overrides, earlier)
    needs = tuple(dict.fromkeys(earlier.values()))
    items.append(SweepItem(overrides, dict(plain), directory, needs))
  return items


def slug(
  base: Mapping[str, Any],
  changed: Mapping[str, Any],
  keys: Iterable[str],
  earlier: Mapping[str, str] = {},
) -> str:
  """A directory name for an item's changes: `num_memory_tokens=8,seed=42`.

  Settings with the base's value are omitted: an experiment in two sweeps is run
  once. The seed is always included. Different changes of the same base have
  different names.

  Args:
    base: config without the item's overrides, as plain data.
    changed: config with the item's overrides.
    keys: "section.key" of the settings that the item sets.
    earlier: the name of the earlier run to which each setting's path refers; a
      digest of the name replaces the path.
  """
  before, after = sections.flatten(base), sections.flatten(changed)
  for key, name in earlier.items():
    after[key] = hashlib.sha256(name.encode()).hexdigest()[:8]
  kept = [k for k in keys if before.get(k) != after[k] or k == "run.seed"]
  return naming.settings(kept, after) or "base"


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
  path = config_name.partition(":")[0]
  sweeps = presets.read(path).get("sweeps")
  if sweeps is None:
    raise UserError(f"--config={path} defines no sweeps")
  return sweeps
