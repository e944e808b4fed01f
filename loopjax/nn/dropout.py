"""Dropout as a function of random keys (arXiv 1207.0580)."""

import jax
import jax.numpy as jnp

from loopjax.types import Array


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
