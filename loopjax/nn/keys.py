"""Random keys of the examples of a batch.

Draws for an example depend only on its key, not on the mesh or the number of
microbatches.
"""

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.types import Array, Batch


def by_example(key: Array, batch: Batch) -> Array:
  """A key for each example, [B], from the key of a step.

  Args:
    key: random key.
    batch: has "row", its examples' rows in the whole batch, unless it is the
      whole batch.
  """
  size = len(batch["targets"])
  rows = batch.get("row", jnp.arange(size, dtype=jnp.int32))
  return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def by_content(key: Array, tokens: Array) -> Array:
  """A key for each row of tokens, [B], the same in any batch.

  Args:
    key: random key.
    tokens: token ids, i32 [B, T].
  """
  prime = np.full(tokens.shape[1], 16_777_619, np.uint32)
  words = tokens.astype(jnp.uint32) * np.cumprod(prime, dtype=np.uint32)[None]
  words = jnp.sum(words, axis=1, dtype=jnp.uint32)
  return jax.vmap(jax.random.fold_in, (None, 0))(key, words)


def normal_by_token(keys: Array | None, positions: Array, width: int) -> Array:
  """Normal draws for every row and position, truncated at 3: f32 [B, T, D].

  Args:
    keys: keys of the rows, [B]; None for the same in every row.
    positions: positions of the tokens, i32 [B, T].
    width: D.
  """
  if keys is None:
    keys = jnp.broadcast_to(jax.random.key(0), (len(positions),))

  def of_token(key: Array, position: Array) -> Array:
    key = jax.random.fold_in(key, position)
    return jax.random.truncated_normal(key, -3.0, 3.0, (width,))

  of_row = jax.vmap(of_token, (None, 0))
  return jax.vmap(of_row)(keys, positions)


def fold_in(keys: Array | None, index: Array | int) -> Array | None:
  """`jax.random.fold_in` of every key of [B]; None if there are none.

  The index is a scalar, or one for each key.
  """
  if keys is None:
    return None
  axis = 0 if jnp.ndim(index) else None
  return jax.vmap(jax.random.fold_in, (0, axis))(keys, index)


def dropout(x: Array, rate: float, keys: Array | None) -> Array:
  """Zeroes each element with probability `rate` and scales up the others.

  Args:
    x: [B, ...].
    rate: 0 <= rate < 1, static.
    keys: random keys [B]; None for no dropout, as in evaluation.

  Returns:
    The same shape and dtype; its expectation is x.
  """
  if keys is None or not rate:
    return x
  draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))
  return jnp.where(draw(keys), x / (1 - rate), 0).astype(x.dtype)
