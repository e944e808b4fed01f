"""Loss and gradients of a batch, accumulated over devices and microbatches."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from loopjax import sharding
from loopjax.nn import twin
from loopjax.types import Batch, Carried, Metrics


class Layout(NamedTuple):
  """How parameters are gathered and cast for the loops.

  Attributes:
    gather: when split parameters are gathered, see `sharding.Config`.
    casts: whether products use parameters in a dtype other than the stored one.
    params: PartitionSpecs of the parameters that have gradients.
    frozen: PartitionSpecs of the others, a prefix of their tree.
  """

  gather: str = "step"
  casts: bool = False
  params: Any = P()
  frozen: Any = P()


def gradients(
  loss_of: Callable[..., Any],
  params: tuple[Any, Any],
  batch: Batch,
  carried: Carried,
  constants: tuple[Any, ...],
  num_microbatches: int,
  layout: Layout,
) -> tuple[Metrics, Carried, Any]:
  """(metrics, next carried state, gradients), accumulated part by part.

  Parts are the microbatches of each device's examples. Losses are normalised by
  the whole batch's mean weight, which makes the mean over parts the loss of the
  whole batch.

  Args:
    loss_of: (params, batch, *constants, frozen) -> (loss, metrics).
    params: the parameters that have gradients, and all others, such as a
      teacher's; split according to `layout`.
    batch: one global batch.
    carried: the state that the family carries.
    constants: other arguments of the loss.
    num_microbatches: number of parts per device.
    layout: how parameters are gathered and cast.
  """
  weights = batch["weights"]
  examples = (
    {**batch, "row": jnp.arange(len(weights), dtype=jnp.int32)},
    carried,
  )
  mean_weight = jnp.mean(weights.astype(jnp.float32))

  def run(examples: Any, others: Any) -> tuple[Any, Any]:
    """(carried state, (gradients, metrics))."""
    params, frozen, mean_weight, constants, rounded = others
    batch, before = examples
    batch = {**batch, "mean_weight": mean_weight, "carried": before}

    def loss(params: Any) -> Any:
      params, others = twin.joined((params, frozen), rounded)
      return loss_of(params, batch, *constants, others)

    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    after = metrics.pop("carried", Carried())
    structure: Any = jax.tree.structure(after)
    assert structure == jax.tree.structure(before)
    return after, (grads, metrics)

  others = (*params, mean_weight, constants)
  specs = (layout.params, layout.frozen, P(), P())
  carried, (grads, metrics) = data_parallel(
    _once(_accumulated(run, num_microbatches), specs, layout),
    specs,
    layout.params,
    allowed=layout.gather == "step",
  )(examples, others)
  return metrics, carried, grads


def _once(function: Any, specs: Any, layout: Layout) -> Any:
  """The function with its parameters cast and gathered before it runs."""
  is_local = layout.gather == "use" or jit_is_disabled()

  def gathered(x: Any, spec: P) -> Any:
    return x if is_local else gather(x, spec)

  def rounded(path: Any, x: Any, spec: P) -> Any:
    if layout.casts and twin.is_multiplied(path, x):
      return gathered(x.astype(jnp.bfloat16), spec)
    return None

  def run(examples: Any, others: Any) -> Any:
    splits = jax.tree.broadcast(specs, others)
    with jax.named_scope("parameters"):
      narrow = jax.tree_util.tree_map_with_path(rounded, others[:2], splits[:2])
      # The compiler gathers no array that is only read in bfloat16.
      others = jax.tree.map(gathered, others, splits)
    return function(examples, (*others, narrow))

  return run


def _accumulated(run: Any, num_parts: int) -> Any:
  """`run`, microbatch by microbatch.

  Part i takes every num_parts-th example: examples stay on their devices.
  """
  if num_parts == 1:
    return run

  def split(x):
    parts = x.reshape(-1, num_parts, *x.shape[1:])
    return jnp.swapaxes(parts, 0, 1)

  def joined(parts):
    return jnp.swapaxes(parts, 0, 1).reshape(-1, *parts.shape[2:])

  def over_parts(examples, others):
    def body(total, part):
      by_example, (grads, means) = run(part, others)
      return jax.tree.map(jnp.add, total, grads), (by_example, means)

    total, (by_example, means) = jax.lax.scan(
      body,
      jax.tree.map(jnp.zeros_like, others[0]),
      jax.tree.map(split, examples),
    )
    grads = jax.tree.map(lambda x: x / num_parts, total)
    means = jax.tree.map(lambda x: jnp.mean(x, axis=0), means)
    return jax.tree.map(joined, by_example), (grads, means)

  return over_parts


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
    allowed: otherwise, the function is returned unchanged, too.
  """
  axes = sharding.compilers_axes()
  ways = math.prod(axes[axis] for axis in sharding.of_batch(axes))
  # XLA fails on some families if it splits one axis and shard_map another.
  if not allowed or ways == 1 or ways < math.prod(axes.values()):
    return function
  if jit_is_disabled():  # shard_map would be a single operation.
    return function

  def averaged(examples: Any, others: Any) -> tuple[Any, Any]:
    by_example, (gradients, means) = function(examples, others)
    splits = jax.tree.broadcast(gradient_specs, gradients)
    gradients = jax.tree.map(_mean, gradients, splits)
    means = jax.lax.pmean(means, sharding.BATCH_AXES)
    return by_example, (gradients, means)

  split = P(sharding.BATCH_AXES)
  return jax.shard_map(
    averaged,
    in_specs=(split, specs),
    out_specs=(split, (gradient_specs, P())),
    axis_names=set(axes),
    check_vma=False,
  )


def jit_is_disabled() -> bool:
  """Whether JAX runs operation by operation, as in `train.loop.find_nan`."""
  # JAX defines its flags at run time, which type checkers do not see.
  return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def gather(x: jax.Array, spec: P) -> jax.Array:
  """A split parameter, gathered over "fsdp"."""
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
