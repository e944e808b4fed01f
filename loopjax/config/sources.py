"""The source of what a run has from outside the package, kept in the run."""

import importlib.util
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from loopjax.data import TASKS
from loopjax.errors import note
from loopjax.models import MODELS

FOLDER = "sources"  # Of a work directory.
_INSTALLED = {"site-packages", "dist-packages"}


def keep(workdir: pathlib.Path, files: Mapping[str, pathlib.Path]) -> None:
  """Copies the `files` of a new run's config."""
  for name, path in files.items():
    kept = workdir / FOLDER / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, kept)


def compare(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Says in a line which of them have changed since the run began."""
  folder = workdir / FOLDER
  changed = [
    name
    for name, path in files(config).items()
    if not (folder / name).is_file()
    or (folder / name).read_bytes() != path.read_bytes()
  ]
  if changed and folder.is_dir():
    note(
      f"{workdir}: {', '.join(changed)} changed since the run began; {folder}"
      " has the files as they were"
    )


def files(config: Mapping[str, Any]) -> dict[str, pathlib.Path]:
  """The paths of a config's own modules, by those from the root of imports.

  Those of its family, task, optimizer and schedule; of a module in a package,
  all modules beside it, which it may import. Without installed packages.
  """
  modules = [
    config[section]["name"]
    for section, registry in (("model", MODELS), ("task", TASKS))
    if registry.is_outside(config[section]["name"])
  ]
  optim = config.get("optim", {})
  functions = (str(optim.get(name, "")) for name in ("name", "schedule"))
  modules += [x.partition(":")[0] for x in functions if ":" in x]
  found = {}
  for module in modules:
    try:
      spec = importlib.util.find_spec(module)
    except Exception:  # Of the package, which is imported; it is needed later.
      continue
    if not spec or not spec.origin or not spec.has_location:
      continue  # Of this process only, or Python's own.
    file = pathlib.Path(spec.origin)
    if _INSTALLED.intersection(file.parts):
      continue
    of_package = spec.parent or ""
    folder = pathlib.Path(*of_package.split("."))
    for path in sorted(file.parent.glob("*.py")) if of_package else [file]:
      found[str(folder / path.name)] = path
  return found
