"""Random keys of the examples of a batch.

Draws for an example depend on its key alone: neither on the mesh nor on the
number of microbatches.
"""

import jax
import jax.numpy as jnp

from loopjax.types import Array, Batch


def by_example(key: Array, batch: Batch) -> Array:
  """A key for each example, [B], from the key of a step.

  Args:
    key: random key.
    batch: has "row", the rows of its examples in the whole batch, unless it is
      the whole batch.
  """
  size = len(batch["targets"])
  rows = batch.get("row", jnp.arange(size, dtype=jnp.int32))
  return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold_in(keys: Array | None, index: Array | int) -> Array | None:
  """`jax.random.fold_in` of every key of [B]; None if there are none."""
  if keys is None:
    return None
  return jax.vmap(jax.random.fold_in, (0, None))(keys, index)
