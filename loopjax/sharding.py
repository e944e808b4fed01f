"""The device mesh, and which dimension of which array lives where."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from loopjax import checks
from loopjax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# First match on the parameter's path wins; what matches none is replicated.
PARAMETER_RULES = (
  (r"(query|key|value|gate)/kernel$", P("fsdp", "tensor")),
  (r"output/kernel$", P("tensor", "fsdp")),
  (r"token_embedding/embedding$", P("tensor", "fsdp")),
  (r"head/kernel$", P("fsdp", "tensor")),
)


@dataclasses.dataclass(frozen=True)
class Config:
  """Devices along each axis; -1 at one of them takes all that are left.

  Attributes:
    data: copies of the model. fsdp: parameters and optimizer state split over
      data-parallel devices. tensor: matrices split within an example.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self) -> None:
    checks.plain_values("mesh", self)
    sizes = [getattr(self, axis) for axis in AXES]
    if sizes.count(-1) > 1 or min(sizes) < -1 or 0 in sizes:
      raise UserError(
        f"mesh {dict(zip(AXES, sizes, strict=True))} needs positive sizes, and"
        " -1 at one axis at most"
      )


def make_mesh(config: Config, devices: Sequence[Any]) -> Mesh:
  """The mesh (data, fsdp, tensor) over devices, all processes' in general."""
  sizes = [getattr(config, axis) for axis in AXES]
  num_devices = len(devices)
  known = int(np.prod([size for size in sizes if size != -1]))
  if -1 in sizes and num_devices % known == 0:
    sizes[sizes.index(-1)] = num_devices // known
  if int(np.prod(sizes)) != num_devices:
    raise UserError(
      f"mesh data={config.data}, fsdp={config.fsdp}, tensor={config.tensor}"
      f" does not fit {num_devices} device(s)"
    )
  return jax.make_mesh(
    tuple(sizes),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
  """NamedSharding for every parameter, by PARAMETER_RULES.

  An axis that does not divide its dimension is not used for it.
  """

  def sharding(path, leaf) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, spec in PARAMETER_RULES:
      if re.search(pattern, name):
        axes = [
          axis if size % mesh.shape[axis] == 0 else None
          for axis, size in zip(spec, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, P(*axes))
    return NamedSharding(mesh, P())

  return jax.tree_util.tree_map_with_path(sharding, params)


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
  """Examples over data and fsdp; `stacked` batches have a step axis first."""
  axes = ("data", "fsdp")
  return NamedSharding(mesh, P(None, axes) if stacked else P(axes))


def check_batch_size(mesh: Mesh, batch_size: int, name: str) -> None:
  """Raises unless every device gets the same number of examples."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  if batch_size < 1 or batch_size % ways:
    raise UserError(
      f"{name}={batch_size} is not a positive multiple of the {ways} devices"
      " that examples are split over"
    )


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
  """This process's part of a batch as one global array per entry."""
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x), batch
  )
