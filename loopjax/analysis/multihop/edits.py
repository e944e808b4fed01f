"""Replacements of a hidden state. Pure functions on arrays."""

from collections.abc import Callable

import jax.numpy as jnp

from loopjax.nn import norm
from loopjax.types import Array

# Norms of equation 3, which the paper does not specify; "rms" gives unit scale,
# like the states of a loop that ends in a norm.
NORMS = ("rms", "match_hidden", "final_norm")
_EPSILON = 1e-6


def at_scale(
  vectors: Array,
  states: Array,
  kind: str,
  final_norm: Callable[[Array], Array],
) -> Array:
  """Norm(W[b]) of DiscoLoop's equation 3.

  Args:
    vectors: W[b], f32 [..., D].
    states: H, the states to replace, f32 [..., D].
    kind: one of NORMS: the RMS norm without a gain, W[b] scaled to the length
      of H, or the model's trained norm with its gain.
    final_norm: the model's trained norm.

  Returns:
    f32 [..., D].
  """
  if kind == "rms":
    return norm.rms_normalise(vectors, _EPSILON)
  if kind == "final_norm":
    return final_norm(vectors)
  assert kind == "match_hidden", kind
  wanted = jnp.linalg.norm(states, axis=-1, keepdims=True)
  length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
  return vectors * (wanted / jnp.maximum(length, _EPSILON))


def blend(
  state: Array,
  k: Array,
  *,
  loop: Array,
  here: Array,
  alpha: Array,
  vectors: Array,
) -> Array:
  """(1 - alpha) H + alpha v at some positions after one loop (equation 3).

  Args:
    state: H, the state after loop k, f32 [B, T, D].
    k: index of the loop from 0, i32 scalar.
    loop: the loop after which to replace, from 1, i32 scalar.
    here: positions to replace, bool [B, T].
    alpha: f32 scalar. 0 keeps H, 1 replaces it entirely.
    vectors: v of every example, f32 [B, D], finite.

  Returns:
    f32 [B, T, D].
  """
  blended = (1 - alpha) * state + alpha * vectors[:, None, :]
  return jnp.where(here[:, :, None] & (k + 1 == loop), blended, state)
