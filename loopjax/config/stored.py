"""The config.json of a work directory, as it was written."""

import pathlib
from collections.abc import Mapping
from typing import Any

from loopjax import sections
from loopjax.config import renames
from loopjax.config.overrides import make, to_dict
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib

# What an extended run may have otherwise.
_EXTENDED = ("run.batch_size", "run.num_steps")


def read_config(workdir: pathlib.Path) -> dict[str, Any]:
  """Reads config.json, the settings of a run by section, by present names.

  Raises:
    UserError: it cannot be read, or was not written by loopjax: Hub folders
      have a file of that name.
  """
  path = workdir / "config.json"
  value = workdir_lib.read_json(path)
  if not all(isinstance(value.get(part), dict) for part in ("model", "task")):
    raise UserError(f"{path}: was not written by loopjax")
  try:
    return renames.of_config(value)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error


def check_config(
  workdir: pathlib.Path,
  config: Mapping[str, Any],
  mode: str,
  extend: bool = False,
) -> None:
  """Raises UserError if the directory has a run with another config.

  Resuming requires the same value for every setting that affects training,
  unless it extends the run; evaluating, for every setting that the checkpoints
  depend on. A setting that config.json lacks is newer than the run; as in
  `config_of_run`, it has its default there.
  """
  if not (workdir / "config.json").exists():
    return
  new = sections.flatten(config)
  defaults = to_dict(make(config["model"]["name"], config["task"]["name"]))
  old = sections.flatten(defaults) | sections.flatten(read_config(workdir))
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
      f"--workdir={workdir} contains a run with another configuration:"
      f" {'; '.join(differing.values())}{extends}"
    )
