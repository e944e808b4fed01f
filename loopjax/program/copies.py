"""Data parallelism: gathered parameters in, averaged gradients out."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from loopjax import sharding


def data_parallel(
  function: Callable[[Any, Any], tuple[Any, Any]],
  specs: Any = P(),
  gradient_specs: Any = P(),
  allowed: bool = True,
) -> Callable[[Any, Any], tuple[Any, Any]]:
  """Runs a function on every device with the device's examples.

  Devices lie along the axes "data" and "fsdp" of the mesh. Their results are
  averaged once, at the end; the compiler would reduce gradients wherever they
  arise, in every loop, layer and microbatch. If the mesh also splits within
  examples, the function is returned unchanged, and the compiler does that.

  Args:
    function: takes a pytree of arrays with a leading axis of examples and a
      pytree of other arrays; returns arrays by example, and (gradients,
      others), floating-point arrays that are averaged over devices.
    specs: how the other arguments are split, a prefix of their pytree; the
      function gets a device's shards, see `gather`.
    gradient_specs: how the gradients are to be split.
    allowed: whether devices have enough memory; otherwise the function is
      returned unchanged.
  """
  axes = sharding.compilers_axes()
  ways = math.prod(axes[axis] for axis in sharding.of_batch(axes))
  # XLA fails on some families if it splits one axis and shard_map another.
  if not allowed or ways == 1 or ways < math.prod(axes.values()):
    return function
  if jit_is_disabled():  # shard_map would be a single operation.
    return function

  def averaged(examples: Any, others: Any) -> tuple[Any, Any]:
    by_example, (gradients, *means) = function(examples, others)
    splits = jax.tree.broadcast(gradient_specs, gradients)
    gradients = jax.tree.map(_mean, gradients, splits)
    means = jax.lax.pmean(means, sharding.BATCH_AXES)
    return by_example, (gradients, *means)

  split = P(sharding.BATCH_AXES)
  return jax.shard_map(
    averaged,
    in_specs=(split, specs),
    out_specs=(split, (gradient_specs, P(), P())),
    axis_names=set(axes),
    check_vma=False,
  )


def jit_is_disabled() -> bool:
  """Whether JAX runs operation by operation, as in `train.loop.find_nan`."""
  # JAX defines its flags at run time, which type checkers do not see.
  return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def gather(x: jax.Array, spec: P) -> jax.Array:
  """A split parameter, gathered except along axes that split within an example.

  Args:
    x: the parameter; inside `data_parallel`, a device's shard.
    spec: how it is split.
  """
  axes = sharding.compilers_axes()
  if axes:
    axes_kept = (_without_fsdp(axis) for axis in spec)
    return jax.lax.with_sharding_constraint(x, P(*axes_kept))
  axis = _fsdp_axis(spec)
  if axis is None:
    return x
  return jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)


def _mean(x: jax.Array, spec: P) -> jax.Array:
  """A device's shard of the mean over devices, inside `data_parallel`."""
  axis = _fsdp_axis(spec)
  if axis is None:
    return jax.lax.pmean(x, sharding.BATCH_AXES)
  x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True)
  return jax.lax.pmean(x / jax.lax.axis_size("fsdp"), "data")


def _fsdp_axis(spec: P) -> int | None:
  """The dimension that "fsdp" splits."""
  dimensions = (
    i for i, axes in enumerate(spec) if "fsdp" in sharding.names_of(axes)
  )
  return next(dimensions, None)


def _without_fsdp(axes: Any) -> tuple[str, ...] | None:
  return (
    tuple(axis for axis in sharding.names_of(axes) if axis != "fsdp") or None
  )
