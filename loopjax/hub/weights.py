"""Converts tensors of a layout to parameters and back, one at a time."""

import collections
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loopjax.errors import UserError
from loopjax.hub import files
from loopjax.hub.layout import Layout, Row
from loopjax.run.checkpoints import integrity

_ROWS = 2048  # Rows of a tensor that are read at a time.
_ALIGNMENT = 64  # Bytes.


def read(
  folder: pathlib.Path,
  layout: Layout,
  abstract: Any,
  head_width: int,
  there: Mapping[str, files.Tensor] | None = None,
) -> Any:
  """Reads the parameters, each directly onto its devices.

  Args:
    folder: a folder of safetensors.
    layout: the layout of its tensors.
    abstract: nested dict of shapes, dtypes (tensors are cast to these) and
      shardings.
    head_width: d_h.
    there: tensors by name that replace those of the folder.

  Returns:
    Nested dict of arrays like `abstract`.

  Raises:
    UserError: a file is damaged; or a tensor is missing, unknown to the model,
      or of another shape or dtype.
  """
  there = files.tensors(folder) if there is None else there
  leaves, treedef = jax.tree.flatten(abstract)
  parts = _parts(layout, abstract, head_width)
  wanted = {name: list(part.tensor) for part in parts for name in part.names()}
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
        "of an unsupported dtype",
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
      functools.partial(_read_part, there, part, leaf),
    )
    for part, leaf in zip(parts, leaves, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


def tensors(
  layout: Layout,
  params: Any,
  head_width: int,
  dtype: str,
  constants: Mapping[str, np.ndarray] | None = None,
) -> dict[str, files.Made]:
  """The tensors of a layout by name, each made when it is asked for.

  Args:
    layout: the layout of the tensors.
    params: nested dict of arrays.
    head_width: d_h.
    dtype: a key of `files.DTYPES`.
    constants: other tensors, which keep their dtype.
  """
  kind = files.DTYPES[dtype]
  source: dict[str, list[tuple[_Part, Any, int]]] = {}
  for part, leaf in zip(
    _parts(layout, params, head_width), jax.tree.leaves(params), strict=True
  ):
    for layer, name in enumerate(part.names()):
      source.setdefault(name, []).append((part, leaf, layer))

  def make(name: str) -> np.ndarray:
    tensor = np.empty(source[name][0][0].tensor, kind)
    rows = tensor.reshape(-1, *source[name][0][0].shape()[1:])
    for part, leaf, layer in source[name]:
      array = np.asarray(leaf[layer] if part.is_stacked() else leaf)
      with np.errstate(over="ignore"):  # Checked below.
        rows[part.rows()] = array.T if part.row.transposed else array
    files.check_finite(name, rows)
    return tensor

  made = {
    name: files.Made(of[0][0].tensor, kind, functools.partial(make, name))
    for name, of in source.items()
  }
  for name, tensor in (constants or {}).items():
    made[name] = files.Made(tensor.shape, tensor.dtype, tensor.view)
  return made


class _Part(NamedTuple):
  """A parameter as a part of a tensor, or of a tensor of each layer.

  Attributes:
    row: its row.
    size: its shape.
    start: its first row in the tensor.
    tensor: the tensor's shape.
    head_width: d_h.
  """

  row: Row
  size: tuple[int, ...]
  start: int
  tensor: tuple[int, ...]
  head_width: int

  def is_stacked(self) -> bool:
    """Whether each layer has a tensor."""
    return "{}" in self.row.theirs

  def names(self) -> list[str]:
    """Names of the tensors, one per layer if stacked."""
    theirs = self.row.theirs
    if not self.is_stacked():
      return [theirs]
    return [theirs.format(layer) for layer in range(self.size[0])]

  def shape(self) -> tuple[int, ...]:
    """The shape of the parameter in one tensor, rows first."""
    own = self.size[1:] if self.is_stacked() else self.size
    return own[::-1] if self.row.transposed else own

  def rows(self) -> Any:
    """The index that selects our rows, in our order, from the tensor's rows."""
    length = self.shape()[0]
    if not self.row.adjacent:
      return slice(self.start, self.start + length)
    # In ours a head's first features come before its second ones.
    pairs = np.arange(length).reshape(-1, self.head_width // 2, 2)
    return self.start + pairs.swapaxes(1, 2).reshape(-1)


def _parts(layout: Layout, params: Any, head_width: int) -> list[_Part]:
  """The part of each parameter, in the order of jax.tree.leaves."""
  sizes = dict(
    zip(
      integrity.names(params),
      (leaf.shape for leaf in jax.tree.leaves(params)),
      strict=True,
    )
  )
  parts: dict[str, _Part] = {}
  lengths: dict[str, int] = {}  # Of the parts of a tensor so far.
  for row in layout.rows:
    if row.ours in sizes:
      start = lengths.get(row.theirs, 0)
      part = _Part(row, sizes[row.ours], start, (), head_width)
      lengths[row.theirs] = start + part.shape()[0]
      parts[row.ours] = part
  unknown = [path for path in sizes if path not in parts]
  if unknown:
    raise UserError(
      f"{layout.architecture} has no {integrity.abbreviate(unknown)}"
    )
  numbers = collections.Counter(part.row.theirs for part in parts.values())

  def whole(part: _Part) -> tuple[int, ...]:
    length = lengths[part.row.theirs]
    if not part.row.by_head:
      return (length, *part.shape()[1:])
    number = numbers[part.row.theirs]
    return (number, 1, length // number // head_width, head_width)

  return [parts[path]._replace(tensor=whole(parts[path])) for path in sizes]


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
  if there[head][:2] != there[table][:2]:
    return ""
  for start in range(0, shape[0], _ROWS):
    part = (slice(start, min(start + _ROWS, shape[0])), slice(0, shape[1]))
    one, other = (there[x].read(part) for x in (head, table))
    if not np.array_equal(one, other):
      return ""
  return head


def _read_part(
  there: Mapping[str, files.Tensor],
  part: _Part,
  leaf: jax.ShapeDtypeStruct,
  index: tuple[slice, ...],
) -> np.ndarray:
  """The slice of a parameter that a device holds, in the parameter's dtype."""
  spans = [
    slice(*one.indices(size)[:2])
    for one, size in zip(index, leaf.shape, strict=True)
  ]
  names, whole = part.names(), part.rows()
  values = _empty([one.stop - one.start for one in spans], leaf.dtype)
  places = values if part.is_stacked() else values[None]
  if part.is_stacked():
    names, spans = names[spans[0]], spans[1:]
  rows, *rest = spans[::-1] if part.row.transposed else spans
  # Rows in another order are read as a whole.
  is_whole = part.row.by_head or not isinstance(whole, slice)
  step = rows.stop - rows.start if is_whole else _ROWS
  for place, name in zip(places, names, strict=True):
    for start in range(rows.start, rows.stop, step):
      some = slice(start, min(start + step, rows.stop))
      found = _read_rows(there[name], part, whole, some, tuple(rest))
      here = slice(start - rows.start, some.stop - rows.start)
      if part.row.transposed:
        place[..., here] = found.T
      else:
        place[here] = found
    files.check_finite(name, place)
  return values


def _read_rows(
  tensor: files.Tensor,
  part: _Part,
  whole: Any,
  rows: slice,
  rest: tuple[slice, ...],
) -> np.ndarray:
  """Rows of a part of a tensor, of which files read slices only."""
  if part.row.by_head:
    everything = tuple(slice(0, size) for size in tensor.shape)
    return tensor.read(everything).reshape(-1)[whole][rows]
  if isinstance(whole, slice):
    rows = slice(part.start + rows.start, part.start + rows.stop)
    return tensor.read((rows, *rest))
  span = slice(part.start, part.start + len(whole))
  return tensor.read((span, *rest))[whole[rows] - part.start]


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
  """An array where XLA wants it: on a CPU it becomes JAX's without a copy."""
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)
