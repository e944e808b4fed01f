"""Dropout as a function of a key; no key, no dropout (arXiv 1207.0580)."""

import jax
import jax.numpy as jnp

from loopjax.types import Array


def dropout(x: Array, rate: float, key: Array | None) -> Array:
  """Zeroes each element with probability `rate`, scales the others up.

  Args:
    x: any shape.
    rate: 0 <= rate < 1, static.
    key: random key; None, as in evaluation, leaves x as it is.

  Returns:
    x's shape and dtype, with x as its mean over keys.
  """
  if key is None or not rate:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def fold(key: Array | None, index: Array | int) -> Array | None:
  """A key of its own for every index; None stays None."""
  return None if key is None else jax.random.fold_in(key, index)
