"""Nested parameters in a file in the safetensors format."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

from loopjax.errors import UserError, one_line
from loopjax.run.checkpoints import integrity
from loopjax.types import Array


def write(path: pathlib.Path, params: Any) -> dict[str, Array]:
  """Writes parameters; returns them by the names that they have in the file."""
  leaves = jax.tree.leaves(params)
  named = dict(zip(integrity.names(params), leaves, strict=True))
  with usual_permissions(path):
    save_file(named, path)
  return named


@contextlib.contextmanager
def usual_permissions(path: pathlib.Path) -> Iterator[None]:
  """Gives a new file the permissions of the user's umask.

  The block may replace it: the library lets only the owner read its files. If
  the block fails, the file is removed.
  """
  path.touch()
  mode = path.stat().st_mode
  try:
    yield
  except BaseException:
    path.unlink(missing_ok=True)
    raise
  path.chmod(mode)


def read(path: pathlib.Path) -> dict[str, Array]:
  """The tensors of a file by name; raises UserError if it is damaged."""
  try:
    return load_file(path)
  except (OSError, SafetensorError) as error:
    raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
