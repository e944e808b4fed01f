"""Loss and gradients of a batch, accumulated over devices and microbatches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from loopjax.nn import twin
from loopjax.program import copies
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
    carried.by_example,
  )
  mean_weight = jnp.mean(weights.astype(jnp.float32))

  def run(examples: Any, others: Any) -> tuple[Any, Any]:
    """(state carried by example, (gradients, shared state, metrics))."""
    params, frozen, shared, mean_weight, constants, rounded = others
    batch, by_example = examples
    before = Carried(by_example, shared)
    batch = {**batch, "mean_weight": mean_weight, "carried": before}

    def loss(params: Any) -> Any:
      params, others = twin.joined((params, frozen), rounded)
      return loss_of(params, batch, *constants, others)

    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    after = metrics.pop("carried", Carried())
    structure: Any = jax.tree.structure(after)
    assert structure == jax.tree.structure(before)
    return after.by_example, (grads, after.shared, metrics)

  others = (*params, carried.shared, mean_weight, constants)
  specs = (layout.params, layout.frozen, P(), P(), P())
  by_example, (grads, shared, metrics) = copies.data_parallel(
    _once(_accumulated(run, num_microbatches), specs, layout),
    specs,
    layout.params,
    allowed=layout.gather == "step",
  )(examples, others)
  return metrics, Carried(by_example, shared), grads


def _once(function: Any, specs: Any, layout: Layout) -> Any:
  """The function with its parameters cast and gathered before it runs.

  Args:
    function: of examples, and of other arguments, the first two of which are
      parameters, and these parameters in bfloat16, None where they are not
      cast.
    specs: how the other arguments are split.
    layout: how parameters are gathered and cast.
  """
  is_local = layout.gather == "use" or copies.jit_is_disabled()

  def gathered(x: Any, spec: P) -> Any:
    return x if is_local else copies.gather(x, spec)

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
