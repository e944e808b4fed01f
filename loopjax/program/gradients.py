"""Loss and gradients of a batch, accumulated over devices and microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from loopjax.program import casts, copies
from loopjax.types import Batch, Carried, Metrics


class Layout(NamedTuple):
  """How parameters are gathered and cast for the loops.

  Attributes:
    gather: when split parameters are gathered: "step", once per step, with
      gradients accumulated on each device and reduced once; "weights", once per
      step, with gradients reduced wherever they arise; "use", wherever a
      parameter is used. See `room.gathering`.
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
  value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
  weights = batch["weights"]
  examples = (
    {**batch, "row": jnp.arange(len(weights), dtype=jnp.int32)},
    carried.by_example,
  )
  mean_weight = jnp.mean(weights.astype(jnp.float32))

  def run(examples: Any, others: Any) -> tuple[Any, Any]:
    """(state carried by example, (gradients, shared state, metrics))."""
    params, frozen, shared, mean_weight, constants = others
    batch, by_example = examples
    before = Carried(by_example, shared)
    batch = {**batch, "mean_weight": mean_weight, "carried": before}
    (_, metrics), grads = value_and_grad(params, batch, *constants, frozen)
    after = metrics.pop("carried", Carried())
    structure: Any = jax.tree.structure(after)
    assert structure == jax.tree.structure(before)
    return after.by_example, (grads, after.shared, metrics)

  others = (*params, carried.shared, mean_weight, constants)
  specs = (layout.params, layout.frozen, P(), P(), P())
  by_example, (grads, shared, metrics) = copies.data_parallel(
    _once(_accumulated(run, num_microbatches), others, specs, layout),
    specs,
    layout.params,
    allowed=layout.gather == "step",
  )(examples, others)
  return metrics, Carried(by_example, shared), grads


def _once(function: Any, others: Any, specs: Any, layout: Layout) -> Any:
  """The function with its `others` cast and gathered before it runs.

  Args:
    function: of examples and other arguments.
    others: the arguments other than examples.
    specs: how they are split.
    layout: when they are gathered.
  """
  if copies.jit_is_disabled():
    return function
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), others
  )
  leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs, others))

  def gathered(x: Any, spec: P) -> Any:
    return x if layout.gather == "use" else copies.gather(x, spec)

  def run(examples: Any, others: Any) -> Any:
    leaves, structure = jax.tree.flatten(others)
    if not layout.casts:
      leaves = [
        gathered(x, spec) for x, spec in zip(leaves, leaf_specs, strict=True)
      ]
      return function(examples, jax.tree.unflatten(structure, leaves))
    program = casts.once(function, examples, shapes)
    # Examples may be in floating-point numbers too.
    rows = jax.tree.leaves(examples)
    rows = _cast(rows, program.dtypes[: len(rows)])
    with jax.named_scope("parameters"):
      cast = _cast(leaves, program.dtypes[len(rows) :])
      leaves = [
        gathered(x, spec) for x, spec in zip(cast, leaf_specs, strict=True)
      ]
    return program.call(*rows, *leaves)

  return run


def _cast(leaves: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
  return [
    x if x.dtype == dtype else x.astype(dtype)
    for x, dtype in zip(leaves, dtypes, strict=True)
  ]


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
      by_example, (grads, *means) = run(part, others)
      return jax.tree.map(jnp.add, total, grads), (by_example, means)

    total, (by_example, means) = jax.lax.scan(
      body,
      jax.tree.map(jnp.zeros_like, others[0]),
      jax.tree.map(split, examples),
    )
    grads = jax.tree.map(lambda x: x / num_parts, total)
    means = jax.tree.map(lambda x: jnp.mean(x, axis=0), means)
    return jax.tree.map(joined, by_example), (grads, *means)

  return over_parts
