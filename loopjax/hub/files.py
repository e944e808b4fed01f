"""Folders of safetensors: checked as a whole, read slice by slice, written.

A folder holds `model.safetensors`, or several files and
`model.safetensors.index.json`, which maps tensors to files.
"""

import contextlib
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from loopjax import checks
from loopjax.errors import UserError, one_line
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints.tensors import usual_permissions

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_ROWS = 8192  # Rows of a table that are checked at a time.
DTYPES: Mapping[str, Any] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}


class Tensor(NamedTuple):
  """A tensor in a file.

  Attributes:
    shape: its shape.
    dtype: a key of DTYPES, or the file's name of another dtype.
    read: from a slice of each axis to an array with this part of the tensor.
  """

  shape: tuple[int, ...]
  dtype: str
  read: Callable[[tuple[slice, ...]], np.ndarray]


class Made(NamedTuple):
  """A tensor to write.

  Attributes:
    shape: its shape.
    dtype: its dtype.
    make: returns it.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Its size in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


def tensors(folder: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a folder by name, read from the headers of its files.

  Raises:
    UserError: there are none, a file is damaged or incomplete, a tensor is in
      two files, or the index contradicts the files.
  """
  index = folder / INDEX
  if (folder / SINGLE).is_file():
    return dict(_of_file(folder / SINGLE))
  if not index.is_file():
    raise UserError(f"{folder}: contains neither {SINGLE} nor {INDEX}")
  listed = workdir_lib.read_json(index).get("weight_map")
  if not isinstance(listed, dict) or not all(
    isinstance(name, str) and pathlib.PurePath(name).name == name
    for name in listed.values()
  ):
    raise UserError(
      f"{index}: weight_map must map tensors to files of the folder"
    )
  found: dict[str, Tensor] = {}
  for part in sorted(set(listed.values())):
    for name, tensor in _of_file(folder / part):
      if listed.get(name) != part:
        raise UserError(f"{index}: weight_map does not place {name} in {part}")
      found[name] = tensor
  for name in listed:
    if name not in found:
      raise UserError(f"{folder / listed[name]}: {name} is missing")
  return found


def check_finite(name: str, values: np.ndarray) -> None:
  """Raises UserError if a tensor, as it is stored, has infinities or NaN."""
  for start in range(0, len(values), _ROWS):
    if not np.isfinite(values[start : start + _ROWS]).all():
      raise UserError(
        f"{name} has values that are infinite or not a number in"
        f" {values.dtype.name}"
      )


def write(
  folder: pathlib.Path, made: Mapping[str, Made], max_bytes: int
) -> None:
  """Writes tensors one after another into files of a limited size.

  Args:
    folder: an empty folder.
    made: the tensors in order.
    max_bytes: maximum size of a file that holds more than one tensor.
  """
  parts: list[list[str]] = [[]]
  size = 0
  for name, tensor in made.items():
    if parts[-1] and size + tensor.nbytes > max_bytes:
      parts.append([])
      size = 0
    parts[-1].append(name)
    size += tensor.nbytes
  files = [
    SINGLE
    if len(parts) == 1
    else f"model-{i:05}-of-{len(parts):05}.safetensors"
    for i in range(1, len(parts) + 1)
  ]
  for file, part in zip(files, parts, strict=True):
    arrays = {name: np.ascontiguousarray(made[name].make()) for name in part}
    with usual_permissions(folder / file):
      # PyTorch's readers require this.
      save_file(arrays, folder / file, metadata={"format": "pt"})
  if len(parts) > 1:
    where = {
      name: file
      for file, part in zip(files, parts, strict=True)
      for name in part
    }
    content = {
      "metadata": {"total_size": sum(x.nbytes for x in made.values())},
      "weight_map": where,
    }
    (folder / INDEX).write_text(
      json.dumps(content, indent=2) + "\n", encoding="utf-8"
    )


def _of_file(path: pathlib.Path) -> Iterable[tuple[str, Tensor]]:
  with _open(path) as opened:
    for name in opened.keys():  # noqa: SIM118  It is not a dict.
      part = opened.get_slice(name)
      read = functools.partial(_read, path, name)
      yield name, Tensor(tuple(part.get_shape()), part.get_dtype(), read)


def _read(
  path: pathlib.Path, name: str, index: tuple[slice, ...]
) -> np.ndarray:
  """A part of a tensor; its file is mapped only for the time of the call."""
  with _open(path) as opened:
    return opened.get_slice(name)[index]


def _open(path: pathlib.Path) -> Any:
  """An open file whose header matches its size.

  Raises:
    UserError: it cannot be read, or is not a complete safetensors file.
  """
  try:
    return safetensors.safe_open(path, framework="np")
  except (OSError, safetensors.SafetensorError) as error:
    wrong = ""
    with contextlib.suppress(OSError), path.open("rb") as file:
      wrong = checks.wrong_file(file.read(64))
    said = wrong or f"cannot be read: {one_line(error)}"
    raise UserError(f"{path}: {said}") from error
