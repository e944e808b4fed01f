"""The common part of the `gated_kv` kernels: shapes, and the backward pass.

A backend computes, for M = B S tokens side by side,

  update: h' = z h + (1 - z) x, and the cache with the tokens' new rows;
  pull_back: with the cotangents of h', of h' W_K and of h' W_V,
    g = dL/dh' + dL/d(h' W_K) W_K^T + dL/d(h' W_V) W_V^T,
    a = g (h - x) z (1 - z), the cotangent of the gate's activation,
    h' (recomputed), a, (1 - z) g and z g.

XLA computes the remaining matrix products:

  dL/dx = (1 - z) g + a W_z^T,  dL/dh = z g + a U_z^T,
  dL/dW_z = x^T a,  dL/dU_z = h^T a,  dL/db_z = sum a,
  dL/dW_K = h'^T dL/d(h' W_K),  dL/dW_V = h'^T dL/d(h' W_V).

The forward pass stores x and h.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels.gated_kv import reference
from loopjax.kernels.vocabulary import product
from loopjax.types import Array


class Kernels(NamedTuple):
  """A backend.

  Attributes:
    update: (x [M, D], h [M, D] or None, weights, cosines [M, d_h], sines [M,
      d_h], cache, start) -> (h' [M, D], cache). If k' is k with the halves of
      each head swapped, the rotation is cosines * k + sines * k'.
    pull_back: (x, h, weights, dL/dh' [M, D], dL/d(h' W_K), dL/d(h' W_V)
      [M, G d_h]) -> h', a in the dtype of x, (1 - z) g, z g in float32; all
      [M, D].
  """

  update: Callable
  pull_back: Callable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_kv(
  kernels: Kernels,
  inputs: Array,
  latent: Array | None,
  weights: reference.Weights,
  tables: tuple[Array, Array],
  cache: tuple[Array, Array],
  start: Array,
) -> tuple[Array, tuple[Array, Array]]:
  """As in `api.gated_kv`, computed by a backend's kernels."""
  width = inputs.shape[-1]
  cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
  after, cache = kernels.update(
    inputs.reshape(-1, width),
    None if latent is None else latent.reshape(-1, width),
    weights,
    jnp.concatenate([cos, cos], axis=-1),
    jnp.concatenate([-sin, sin], axis=-1),
    cache,
    start,
  )
  return after.reshape(inputs.shape), cache


def _forward(kernels, inputs, latent, weights, tables, cache, start):
  results = gated_kv(kernels, inputs, latent, weights, tables, cache, start)
  return results, (inputs, latent, weights, tables, start)


def _backward(kernels, residuals, cotangents):
  inputs, latent, weights, tables, start = residuals
  d_after, d_cache = cotangents
  num_tokens, width = inputs.shape[1:]
  compute = inputs.dtype
  d_key, d_value = (
    reference.read(x, start, num_tokens).astype(tables[0].dtype)
    for x in d_cache
  )
  cos, sin = tables
  d_key = reference.rotate(d_key, (cos, -sin))  # The inverse rotation.
  d_key, d_value = (
    x.reshape(inputs.shape[0] * num_tokens, -1).astype(compute)
    for x in (d_key, d_value)
  )
  x, d_after = inputs.reshape(-1, width), d_after.reshape(-1, width)
  if latent is None:
    after, d_latent = x, None
    d_inputs = d_after.astype(jnp.float32)
    d_inputs += product("me,de->md", d_key, weights.key)
    d_inputs += product("me,de->md", d_value, weights.value)
    d_gate = jax.tree.map(jnp.zeros_like, weights[:3])
  else:
    h = latent.reshape(-1, width)
    after, d_gate_in, d_inputs, d_latent = kernels.pull_back(
      x, h, weights, d_after, d_key, d_value
    )
    d_inputs += product("me,de->md", d_gate_in, weights.gate_input)
    d_latent += product("me,de->md", d_gate_in, weights.gate_latent)
    d_latent = d_latent.astype(latent.dtype).reshape(latent.shape)
    d_gate = [
      product("md,me->de", x, d_gate_in),
      product("md,me->de", h, d_gate_in),
      jnp.sum(d_gate_in.astype(jnp.float32), axis=0),
    ]
  d_weights = reference.Weights(
    *d_gate,
    product("md,me->de", after, d_key),
    product("md,me->de", after, d_value),
  )
  d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
  none = jnp.zeros((*inputs.shape[:2], *d_cache[0].shape[2:]))
  return (
    d_inputs.astype(compute).reshape(inputs.shape),
    d_latent,
    d_weights,
    None,
    tuple(reference.write(x, none, start) for x in d_cache),
    None,
  )


gated_kv.defvjp(_forward, _backward)
