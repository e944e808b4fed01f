"""Reference implementation of `gated_kv` in plain JAX."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels.vocabulary import product
from loopjax.types import Array


class Weights(NamedTuple):
  """Parameters of the update, for inputs of width D and G heads of width d_h.

  The gate's parameters may be None if `gated_kv` gets no latent.

  Attributes:
    gate_input: W_z [D, D]; [D, 1] of a scalar gate, which only `gate` takes.
    gate_latent: U_z [D, D] or [D, 1].
    gate_bias: b_z [D] or [1].
    key: W_K [D, G d_h].
    value: W_V [D, G d_h].
  """

  gate_input: Any
  gate_latent: Any
  gate_bias: Any
  key: Array
  value: Array


def gated_kv(
  inputs: Array,
  latent: Array | None,
  weights: Weights,
  tables: tuple[Array, Array],
  cache: tuple[Array, Array] | None = None,
  start: Array | None = None,
) -> tuple[Array, tuple[Array, Array]]:
  """As in `api.gated_kv`; autodiff stores the gate and the blend's terms."""
  latent = inputs if latent is None else blend(inputs, latent, weights)
  key, value = project(latent, weights, tables)
  if cache is None:
    return latent, (key.astype(inputs.dtype), value.astype(inputs.dtype))
  assert start is not None
  return latent, (write(cache[0], key, start), write(cache[1], value, start))


def project(
  latent: Array, weights: Weights, tables: tuple[Array, Array]
) -> tuple[Array, Array]:
  """RoPE(h W_K) and h W_V of h [B, S, D], float32 [B, S, G, d_h] each.

  MELT, section 3.2 (arXiv 2605.07721).
  """

  def heads(matrix: Array) -> Array:
    x = product("bsd,de->bse", latent, matrix)
    return x.reshape(*x.shape[:-1], -1, 2 * tables[0].shape[-1])

  return rotate(heads(weights.key), tables), heads(weights.value)


def gate(inputs: Array, latent: Array, weights: Weights) -> Array:
  """z = sigmoid(x W_z + h U_z + b_z), the fraction of h that is kept.

  MELT, section 3.2 (arXiv 2605.07721).

  Args:
    inputs, latent: x and h, [..., D].

  Returns:
    [..., D] in float32, or float64 for float64 inputs.
  """
  activation = product("...d,de->...e", inputs, weights.gate_input)
  activation += product("...d,de->...e", latent, weights.gate_latent)
  bias = weights.gate_bias.astype(activation.dtype)
  return jax.nn.sigmoid(activation + jnp.broadcast_to(bias, activation.shape))


def blend(inputs: Array, latent: Array, weights: Weights) -> Array:
  """z h + (1 - z) x, in the dtype of x; exactly x where h = x."""
  return interpolate(gate(inputs, latent, weights), latent, inputs)


def interpolate(share: Array, old: Array, new: Array) -> Array:
  """share old + (1 - share) new, in the dtype of new.

  MELT's equation 1, where the share is z; and the mixture of section 3.3, where
  it is alpha: keys and values are linear in their input (arXiv 2605.07721).
  """
  new_, old_ = new.astype(share.dtype), old.astype(share.dtype)
  return (new_ + share * (old_ - new_)).astype(new.dtype)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
  """Rotates x [B, S, G, d_h] in the half-split layout.

  Args:
    x: float32 or wider.
    tables: cosines and sines [B, S, d_h / 2].
  """
  cos, sin = (table[:, :, None].astype(x.dtype) for table in tables)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def write(cache: Array, new: Array, start: Array) -> Array:
  """The cache [B, L, G, d_h] with rows of S tokens [B, S, G, d_h] replaced."""
  place = _places(start, new.shape[1], cache.shape[1])
  return cache.at[place].set(new.astype(cache.dtype), mode="drop")


def read(cache: Array, start: Array, num_tokens: int) -> Array:
  """The rows [B, S, G, d_h] that `write` replaces; zeros where it does not."""
  place = _places(start, num_tokens, cache.shape[1])
  return cache.at[place].get(mode="fill", fill_value=0)


def _places(start: Array, num_tokens: int, length: int) -> tuple[Array, Array]:
  """Example and row of each token; the row is L where nothing is written."""
  fits = (start >= 0) & (start <= length - num_tokens)
  rows = start[:, None] + jnp.arange(num_tokens)[None]
  return jnp.arange(len(start))[:, None], jnp.where(fits[:, None], rows, length)
