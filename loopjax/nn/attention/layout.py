"""Attention's operands by head, in the layouts that products take."""

from typing import Any

import jax.numpy as jnp

from loopjax.types import Array


def by_head(x: Array, groups: int) -> Array:
  """[B, T, H, d_h] -> [B, G, R T, d_h], the R heads of a group in order."""
  batch, length, heads, width = x.shape
  x = jnp.transpose(x, (0, 2, 1, 3))
  return x.reshape(batch, groups, heads // groups * length, width)


def columns(x: Array, groups: int) -> Array:
  """[B, T, H, d_h] -> [B, G, d_h, R T]: the transpose of `by_head`."""
  return jnp.swapaxes(by_head(x, groups), 2, 3)


def by_token(x: Array, query: Array) -> Array:
  """[B, G, R T, d_h] -> [B, T, H, d_h], the inverse of `by_head`."""
  batch, length, heads, _ = query.shape
  x = x.reshape(batch, heads, length, x.shape[-1])
  return jnp.transpose(x, (0, 2, 1, 3))


def product(equation: str, left: Array, right: Array) -> Array:
  """einsum that accumulates and returns float32, or a wider input dtype."""
  wide: Any = jnp.promote_types(jnp.float32, left.dtype)
  return jnp.einsum(equation, left, right, preferred_element_type=wide)
