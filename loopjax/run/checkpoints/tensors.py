"""Nested parameters in a file in the safetensors format."""

import pathlib
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
  save_file(named, path)
  path.chmod(0o644)  # save_file lets only the owner read it.
  return named


def read(path: pathlib.Path) -> dict[str, Array]:
  """The tensors of a file by name; raises UserError if it is damaged."""
  try:
    return load_file(path)
  except (OSError, SafetensorError) as error:
    raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
