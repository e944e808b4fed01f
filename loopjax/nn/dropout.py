"""Dropout as a function of a random key (arXiv 1207.0580)."""

import jax
import jax.numpy as jnp

from loopjax.types import Array


def dropout(x: Array, rate: float, key: Array | None) -> Array:
  """Zeroes each element with probability `rate` and scales up the others.

  Args:
    x: any shape.
    rate: 0 <= rate < 1, static.
    key: random key; None for no dropout, as in evaluation.

  Returns:
    The same shape and dtype; its expectation is x.
  """
  if key is None or not rate:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def fold(key: Array | None, index: Array | int) -> Array | None:
  """`jax.random.fold_in`; None if there is no key."""
  return None if key is None else jax.random.fold_in(key, index)
