"""Reference implementation of `gated_delta` in plain JAX, token by token."""

import jax
import jax.numpy as jnp

from loopjax.types import Array

_EPSILON = 1e-6


def gated_delta(
  query: Array,
  key: Array,
  value: Array,
  log_decay: Array,
  write: Array,
  state: Array,
) -> tuple[Array, Array]:
  """As in `api.gated_delta`; autodiff stores a state for every token."""
  wide, num_heads = state.dtype, value.shape[2]
  tokens = tuple(
    jnp.moveaxis(x.astype(wide), 1, 0)
    for x in (
      repeat_heads(query.astype(wide), num_heads),
      repeat_heads(key.astype(wide), num_heads),
      value,
      log_decay,
      write,
    )
  )

  def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    query, key, value, log_decay, write = token
    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
    state = jnp.exp(log_decay)[..., None, None] * state
    error = value - product("bhk,bhkv->bhv", key, state)
    written = write[..., None] * error
    state += key[..., :, None] * written[..., None, :]
    return state, product("bhk,bhkv->bhv", query, state)

  state, output = jax.lax.scan(step, state, tokens)
  return jnp.moveaxis(output, 0, 1), state


def repeat_heads(x: Array, num_heads: int) -> Array:
  """[B, T, H_k, d_k] -> [B, T, num_heads, d_k], repeating each head."""
  return jnp.repeat(x, num_heads // x.shape[2], axis=2)


def unit(x: Array) -> Array:
  """x / |x| along the last axis; zeros stay, with a finite gradient."""
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + _EPSILON)


def product(equation: str, *operands: Array) -> Array:
  """einsum whose operands accelerators do not round."""
  return jnp.einsum(equation, *operands, precision="highest")
