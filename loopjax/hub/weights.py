"""Converts tensors of a layout to parameters and back, one at a time."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from loopjax.errors import UserError
from loopjax.hub import files
from loopjax.hub.layouts import Layout, Row
from loopjax.run import integrity

_ROWS = 8192  # Rows of a table that are compared at a time.
_ALIGNMENT = 64  # Bytes.


def read(folder: pathlib.Path, layout: Layout, abstract: Any) -> Any:
  """Reads the parameters, each directly onto its devices.

  Args:
    folder: a folder of safetensors.
    layout: the layout of its tensors.
    abstract: nested dict of shapes, dtypes (tensors are cast to these) and
      shardings.

  Returns:
    Nested dict of arrays like `abstract`.

  Raises:
    UserError: a file is damaged; or a tensor is missing, unknown to the model,
      or of another shape or dtype.
  """
  there = files.tensors(folder)
  leaves, treedef = jax.tree.flatten(abstract)
  rows = _rows(layout, abstract)
  wanted = {
    name: list(_shape(row, leaf.shape))
    for row, leaf in zip(rows, leaves, strict=True)
    for name in _names(row, leaf.shape)
  }
  copied = _copied_head(layout, wanted, there)
  found = {
    name: list(tensor.shape)
    for name, tensor in there.items()
    if name in wanted or not (name == copied or name.endswith(layout.ignored))
  }
  problems = [
    f"{label} {integrity.abbreviate(names)}"
    for label, names in (
      ("missing", [name for name in wanted if name not in found]),
      ("not in the model", [name for name in found if name not in wanted]),
      (
        "other shape",
        [
          f"{name} ({shape} there, {wanted[name]} here)"
          for name, shape in found.items()
          if wanted.get(name, shape) != shape
        ],
      ),
      (
        "of a dtype that is not read",
        [
          f"{name} ({there[name].dtype})"
          for name in found
          if there[name].dtype not in files.DTYPES
        ],
      ),
    )
    if names
  ]
  if problems:
    raise UserError(f"{folder} does not fit: {'; '.join(problems)}")
  arrays = [
    jax.make_array_from_callback(
      leaf.shape,
      leaf.sharding,
      functools.partial(_part, there, row, leaf),
    )
    for row, leaf in zip(rows, leaves, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


def write(
  folder: pathlib.Path,
  layout: Layout,
  params: Any,
  dtype: str,
  max_bytes: int,
) -> None:
  """Writes parameters as the tensors of a layout.

  Args:
    folder: an empty folder.
    layout: the layout of the tensors.
    params: nested dict of arrays.
    dtype: a key of `files.DTYPES`.
    max_bytes: maximum size of a file.
  """
  leaves = jax.tree.leaves(params)
  source = {
    name: (row, leaf, layer)
    for row, leaf in zip(_rows(layout, params), leaves, strict=True)
    for layer, name in enumerate(_names(row, leaf.shape))
  }
  kind = files.DTYPES[dtype]

  def make(name: str) -> np.ndarray:
    row, leaf, layer = source[name]
    array = np.asarray(leaf[layer] if "{}" in row.theirs else leaf)
    return (array.T if row.transposed else array).astype(kind)

  sizes = {
    name: int(np.prod(_shape(row, leaf.shape))) * kind.itemsize
    for name, (row, leaf, _) in source.items()
  }
  files.write(folder, sizes, make, max_bytes)


def _rows(layout: Layout, params: Any) -> list[Row]:
  """The row of each parameter, in the order of jax.tree.leaves."""
  rows = {row.ours: row for row in layout.rows}
  paths = integrity.names(params)
  unknown = [path for path in paths if path not in rows]
  if unknown:
    raise UserError(
      f"{layout.architecture} has no {integrity.abbreviate(unknown)}"
    )
  return [rows[path] for path in paths]


def _copied_head(
  layout: Layout,
  wanted: Mapping[str, Any],
  there: Mapping[str, files.Tensor],
) -> str:
  """The name of a head tensor that duplicates a tied embedding, or "".

  Some files store one; a head that differs from the embedding does not count.
  """
  rows = {row.ours: row.theirs for row in layout.rows}
  head, table = rows["head/kernel"], rows["token_embedding/embedding"]
  if head in wanted or not {head, table} <= there.keys():
    return ""
  shape = there[table].shape
  if there[head][1:] != there[table][1:]:
    return ""
  for start in range(0, shape[0], _ROWS):
    part = (slice(start, min(start + _ROWS, shape[0])), slice(0, shape[1]))
    one, other = (files.read(x, there[x], part) for x in (head, table))
    if not np.array_equal(one, other):
      return ""
  return head


def _names(row: Row, shape: tuple[int, ...]) -> list[str]:
  """Names of the tensors of a parameter, one per layer if stacked."""
  if "{}" not in row.theirs:
    return [row.theirs]
  return [row.theirs.format(layer) for layer in range(shape[0])]


def _shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape of one tensor of a parameter."""
  own = shape[1:] if "{}" in row.theirs else shape
  return own[::-1] if row.transposed else own


def _part(
  there: Mapping[str, files.Tensor],
  row: Row,
  leaf: jax.ShapeDtypeStruct,
  index: tuple[slice, ...],
) -> np.ndarray:
  """The slice of a parameter that a device holds, in the parameter's dtype."""
  spans = [
    slice(*one.indices(size)[:2])
    for one, size in zip(index, leaf.shape, strict=True)
  ]
  names = _names(row, leaf.shape)
  part = _empty([one.stop - one.start for one in spans], leaf.dtype)
  if len(spans) > len(_shape(row, leaf.shape)):
    names, spans, places = names[spans[0]], spans[1:], part
  else:
    places = part[None]
  theirs = tuple(spans[::-1] if row.transposed else spans)
  for place, name in zip(places, names, strict=True):
    values = files.read(name, there[name], theirs)
    place[...] = values.T if row.transposed else values
  return part


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
  """An array where XLA wants it: on a CPU it becomes JAX's without a copy."""
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)
