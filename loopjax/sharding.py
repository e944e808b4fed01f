"""The device mesh, and how arrays are sharded over it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from loopjax import checks
from loopjax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
GATHER = ("step", "weights", "use")  # From the most memory to the least.


@dataclasses.dataclass(frozen=True)
class Config:
  """Devices along each axis; one axis may be -1, all remaining devices.

  Attributes:
    data: number of copies of the model.
    fsdp: data-parallel devices over which parameters and optimizer state are
      split.
    tensor: devices over which matrices are split within an example.
    min_split_size: parameters with fewer elements are replicated, as splitting
      them would cost more communication than it saves memory; larger ones must
      be split if fsdp or tensor is more than 1.
    gather: when parameters that fsdp splits are gathered: "step", once a step,
      and each device sums its gradients, which are reduced once; "weights",
      once a step, with gradients reduced wherever they arise; "use", wherever
      a parameter is used, as always with tensor. Each of them needs less memory
      than the one before, and more communication.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  min_split_size: int = checks.setting(2**16, least=1)
  gather: str = "step"

  def __post_init__(self) -> None:
    checks.plain_values("mesh", self)
    checks.one_of("mesh", self, gather=GATHER)
    if self.tensor > 1:
      checks.without_effect("mesh", self, "tensor", "gather")
    sizes = [getattr(self, axis) for axis in AXES]
    if sizes.count(-1) > 1 or min(sizes) < -1 or 0 in sizes:
      raise UserError(
        f"mesh {dict(zip(AXES, sizes, strict=True))} needs positive sizes, with"
        " at most one -1"
      )


def make_mesh(config: Config, devices: Sequence[Any]) -> Mesh:
  """The mesh (data, fsdp, tensor) over devices, usually of all processes."""
  sizes = [getattr(config, axis) for axis in AXES]
  num_devices = len(devices)
  given_size = int(np.prod([size for size in sizes if size != -1]))
  if -1 in sizes and num_devices % given_size == 0:
    sizes[sizes.index(-1)] = num_devices // given_size
  if int(np.prod(sizes)) != num_devices:
    raise UserError(
      f"mesh data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}"
      f" does not fit {num_devices} device(s)"
    )
  # An axis may use part of a torus dimension, which jax.make_mesh refuses.
  grid = mesh_utils.create_device_mesh(
    sizes, devices, allow_split_physical_axes=True
  )
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_shardings(
  mesh: Mesh, params: Any, splits: Any, min_split_size: int
) -> Any:
  """NamedSharding for every parameter.

  If no dimension is a multiple of the axes that should split it, the axes are
  tried in reverse order. Parameters with fewer elements than `min_split_size`
  are replicated; a larger one that would be, too, is an error.

  Args:
    splits: PartitionSpec of each parameter's last dimensions.
  """
  is_split = mesh.shape["fsdp"] * mesh.shape["tensor"] > 1

  def sharding(path, leaf, split) -> NamedSharding:
    if not is_split or math.prod(leaf.shape) < min_split_size:
      return replicated(mesh)
    sizes = leaf.shape[leaf.ndim - len(split) :]
    for spec in (split, split[::-1]):  # An odd vocabulary splits by feature.
      axes = [
        _dividing(mesh, axis, size)
        for axis, size in zip(spec, sizes, strict=True)
      ]
      if any(axes):
        break
    else:
      reason = (
        "no dimension is a multiple of the mesh axes that would split it"
        if len(split)
        else "its row of the parameter table splits no dimension"
      )
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      raise UserError(
        f"mesh {_sizes(mesh)}: parameter {name} {list(leaf.shape)} would be"
        f" replicated on every device: {reason}"
      )
    return NamedSharding(mesh, P(*[None] * (leaf.ndim - len(split)), *axes))

  return jax.tree_util.tree_map_with_path(sharding, params, splits)


def _dividing(mesh: Mesh, axes: Any, size: int) -> tuple[str, ...] | None:
  """The mesh axes that split a dimension evenly, taken from the left."""
  used: tuple[str, ...] = ()
  ways = 1
  for axis in names_of(axes):
    size_of_axis = mesh.shape[axis]
    if size_of_axis > 1 and size % (ways * size_of_axis) == 0:
      used, ways = (*used, axis), ways * size_of_axis
  return used or None


def split_by_example(x: jax.Array) -> jax.Array:
  """Constrains activations [B, ...] to be split by example, under a mesh.

  Without this the compiler may split features as the parameters are split, and
  gather the batch on every device.
  """
  axes = compilers_axes()
  if not axes:
    return x
  return jax.lax.with_sharding_constraint(x, P(of_batch(axes)))


def gather_parameter(x: jax.Array) -> jax.Array:
  """Constrains a parameter that every token reads to be gathered, under a mesh.

  Without this the compiler may split it as the examples are split, and change
  from that to the parameter's own split by copying all of it.
  """
  if not compilers_axes():
    return x
  return jax.lax.with_sharding_constraint(x, P())


def by_matrix(function: Callable[[Any], Any], x: jax.Array) -> jax.Array:
  """Applies a function to every matrix of a stack, distributed over fsdp.

  A device then has whole matrices, instead of a part of each, and computes
  without communication; they are moved before and after. Zeros pad the count to
  a multiple of the devices. With `tensor`, the compiler could move them only by
  gathering everything, so they are not moved.

  Args:
    function: of [count, rows, columns], matrix by matrix, to the same shape.
    x: [..., rows, columns].
  """
  axes = compilers_axes()
  ways = axes.get("fsdp", 1)
  if ways == 1 or axes.get("tensor", 1) > 1:
    return function(x)
  stack = x.reshape(-1, *x.shape[-2:])
  count = len(stack)
  stack = jnp.pad(stack, ((0, -count % ways), (0, 0), (0, 0)))
  stack = jax.lax.with_sharding_constraint(stack, P("fsdp"))
  stack = jax.lax.with_sharding_constraint(function(stack), P("fsdp"))
  return stack[:count].reshape(x.shape)


def compilers_axes() -> dict[str, int]:
  """Axes of the mesh, and sizes, over which the compiler splits arrays here.

  Excludes axes over which a surrounding function has already split them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return {axis: mesh.shape[axis] for axis in mesh.auto_axes}


def platform() -> str:
  """The platform of the devices that are compiled for.

  Under a mesh its own, which may be of an absent machine (`loopjax.fit`).
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def names_of(axes: Any) -> tuple[str, ...]:
  """The axes that split a dimension, from its entry in a PartitionSpec."""
  return (axes,) if isinstance(axes, str) else axes or ()


def of_batch(axes: Iterable[str]) -> tuple[str, ...]:
  """The axes that split examples."""
  return tuple(axis for axis in BATCH_AXES if axis in axes)


def by_example(
  function: Callable[[Any, Any], Any], num_examples: int
) -> Callable[[Any, Any], Any]:
  """The function, run by every device on its own examples, under a mesh.

  Kernels need this, because the compiler cannot split them.

  Args:
    function: of pytrees of arrays with a leading axis of examples, and of other
      arrays, which are replicated; it returns arrays by example.
    num_examples: over all devices. If they cannot be divided equally, the
      function is returned unchanged.
  """
  axes = compilers_axes()
  batch_axes = of_batch(axes)
  ways = math.prod(axes[axis] for axis in batch_axes)
  if ways == 1 or num_examples % ways:
    return function
  split = P(batch_axes)
  return jax.shard_map(
    function,
    in_specs=(split, P()),
    out_specs=split,
    axis_names=set(axes),
    check_vma=False,
  )


def _sizes(mesh: Mesh) -> str:
  return ", ".join(f"{axis}={mesh.shape[axis]}" for axis in AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  """A full copy of the array on every device."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
  """Examples over data and fsdp; `stacked` batches have a step axis first."""
  return NamedSharding(mesh, P(None, BATCH_AXES) if stacked else P(BATCH_AXES))


def check_batch_size(
  mesh: Mesh, batch_size: int, name: str, num_parts: int = 1
) -> None:
  """Raises UserError unless devices get equal shares of every microbatch."""
  ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  if batch_size < 1 or batch_size % (ways * num_parts):
    parts = f" and {num_parts} microbatches" if num_parts > 1 else ""
    raise UserError(
      f"{name}={batch_size} is not a positive multiple of the {ways}"
      f" devices{parts} that split the batch"
    )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
  """Rows of a global batch that this process's devices hold, ascending.

  If a tensor axis spans several processes, all of them hold the same example.
  """
  indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
  rows = [np.arange(batch_size)[index] for index in indices.values()]
  return np.unique(np.concatenate(rows))


@jax.transfer_guard("allow")  # The only upload of a step.
def put_batch(
  mesh: Mesh, batch: Any, batch_size: int, *, stacked: bool = False
) -> Any:
  """Global arrays from this process's rows, see `local_rows`.

  The rows are [rows, ...], or [steps, rows, ...] if `stacked`.
  """
  sharding = batch_sharding(mesh, stacked=stacked)
  rows = local_rows(mesh, batch_size)
  axis = int(stacked)

  def put(x):
    shape = (*x.shape[:axis], batch_size, *x.shape[axis + 1 :])

    def part(index):
      start, stop, _ = index[axis].indices(batch_size)
      first = int(np.searchsorted(rows, start))
      return x[(*index[:axis], slice(first, first + stop - start))]

    return jax.make_array_from_callback(shape, sharding, part)

  return jax.tree.map(put, batch)
