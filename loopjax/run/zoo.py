"""Trained models that come with the package: `zoo:NAME` stands for a run.

Each is a folder of `loopjax/zoo` with config.json and summary.json as in a work
directory, `params.safetensors` instead of checkpoints, and a model card,
README.md. `loopjax.zoo` writes them.
"""

import pathlib
import re
from typing import Any

from loopjax.errors import UserError, local_path, similar

PREFIX, PARAMS = "zoo:", "params.safetensors"
ROOT = pathlib.Path(__file__).parent.parent / "zoo"


def names() -> list[str]:
  """The names of the models."""
  return sorted(path.parent.name for path in ROOT.glob(f"*/{PARAMS}"))


def located(workdir: pathlib.Path) -> pathlib.Path:
  """The directory of a run: zoo:NAME in the package, other paths unchanged.

  A leading ~ is the user's home.
  """
  if not str(workdir).startswith(PREFIX):
    return local_path(workdir)
  name = str(workdir).removeprefix(PREFIX)
  if name not in names():
    there_are = ", ".join(names())
    near = similar(name, names())
    raise UserError(
      f"{workdir}: no such model; expected one of {there_are}{near}"
    )
  return ROOT / name


def suggestion(workdir: pathlib.Path) -> str:
  """A suggestion to append to a message about a missing directory, or ""."""
  if workdir.name in names():
    return f"; did you mean {PREFIX}{workdir.name}?"
  there = workdir.parent.glob("*")
  return similar(workdir.name, [path.name for path in there if path.is_dir()])


def refuse(workdir: pathlib.Path, instead: str) -> None:
  """Raises UserError for zoo:NAME where only a run is supported."""
  if str(workdir).startswith(PREFIX):
    located(workdir)  # Says so if there is no such model.
    raise UserError(f"{workdir} is a trained model, not a run; {instead}")


def output(workdir: pathlib.Path) -> pathlib.Path:
  """The output directory for a run: for zoo:NAME, runs/NAME."""
  name = str(workdir)
  if not name.startswith(PREFIX):
    return workdir
  return pathlib.Path("runs", name.removeprefix(PREFIX))


def write(folder: pathlib.Path, params: Any, dtype: Any) -> None:
  """Writes nested parameters as `params.safetensors`, cast to a dtype."""
  import jax  # Takes long: places and names need none of these.

  from loopjax.run.checkpoints import tensors

  cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
  tensors.write(folder / PARAMS, cast)


def read(
  folder: pathlib.Path, abstract_params: Any, optional: str = ""
) -> dict[str, Any]:
  """Reads nested parameters, with the dtypes and shardings of the target.

  Args:
    folder: the folder of the model.
    abstract_params: nested dict with target dtypes and shardings.
    optional: regular expression of parameters that may be missing.
  """
  import jax

  from loopjax.run.checkpoints import integrity, tensors

  path = folder / PARAMS
  there = tensors.read(path)
  missing = {
    name
    for name in set(integrity.names(abstract_params)) - there.keys()
    if optional and re.search(optional, name)
  }
  target = integrity.without(abstract_params, missing)
  wanted = integrity.describe(target)
  found = {
    name: [list(array.shape), wanted.get(name, [None, str(array.dtype)])[1]]
    for name, array in there.items()
  }
  integrity.compare(wanted, found, path)
  return jax.tree.map(
    lambda name, leaf: jax.device_put(
      there[name].astype(leaf.dtype), leaf.sharding
    ),
    jax.tree.unflatten(jax.tree.structure(target), list(wanted)),
    target,
  )
