"""A layer of MELT: the latent of its tokens, and attention to the rows of all.

Section 3.2 of arXiv 2605.07721. The input x is what keys and values are made of
in a looped model, the normed residual stream, so that with z = 0 one is the
other; queries are made of x. The latent of the first loop is x.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.kernels.gated_kv import Weights, gated_kv, reference
from loopjax.models.melt.config import LEARNED, Config
from loopjax.nn import block, dot_product, linear, rope
from loopjax.types import PRECISIONS, Array

EMA_KEEP = 0.2  # The mean of what MELT's gates learned (section 4.4.1).
Rows = tuple[Array, Array]  # Keys, rotated, and values.


class Gate(nnx.Module):
  """z = sigmoid(x W_z + h U_z + b_z), of every feature or of a token."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    features = config.width if config.gate == "element" else 1
    shared: dict[str, Any] = {
      "init": nnx.initializers.normal(config.init_std),
      "precision": PRECISIONS[config.precision],
      "rngs": rngs,
    }
    self.input = linear.linear(config.width, features, **shared)
    self.latent = linear.linear(config.width, features, **shared)
    bias = jnp.full(features, config.gate_bias, shared["precision"].params)
    self.bias = nnx.Param(bias)


def make_gates(config: Config, rngs: nnx.Rngs) -> Gate | None:
  """The gates of all layers, stacked; None if no parameters make them."""
  if config.gate not in LEARNED:
    return None
  return jax.vmap(lambda key: Gate(config, rngs=nnx.Rngs(params=key)))(
    jax.random.split(rngs.params(), config.num_layers)
  )


class Layer(NamedTuple):
  """One layer's parameters, or those of all, stacked.

  Attributes:
    block: with the parameters of a looped model.
    gate: None where nothing is learned.
  """

  block: block.Block
  gate: Gate | None


def inputs(layer: Layer, hidden: Array) -> Array:
  """x [B, S, D], in the compute dtype, of the residual stream."""
  normed = layer.block.attention_norm(hidden)
  return normed.astype(layer.block.attention.precision.compute)


def update(
  layer: Layer,
  mode: str,
  loop: Array,
  x: Array,
  latent: Array,
  tables: tuple[Array, Array],
  rows: Rows,
  start: Array,
) -> tuple[Array, Rows]:
  """The latent after a loop, and its keys and values where `rows` start.

  Args:
    layer: its gate and projections.
    mode: one of GATES.
    loop: from 0, i32 scalar; in the first the latent becomes x.
    x: [B, S, D]. latent: after the loop before [B, S, D].
    tables: rotary tables [B, S, d_h / 2].
    rows: keys and values [B, L, G, d_h]; start: i32 [B], -1 to write none.
  """
  latent = jnp.where(loop == 0, x, latent)
  weights = _weights(layer)
  if mode == "element":
    return gated_kv(x, latent, weights, tables, rows, start)
  if mode == "scalar":
    latent = reference.blend(x, latent, weights)
  else:
    latent = _blend(x, latent, fixed_keep(mode, loop))
  return gated_kv(latent, None, _projections(layer), tables, rows, start)


def project(layer: Layer, latent: Array, tables: tuple[Array, Array]) -> Rows:
  """Keys and values [B, S, G, d_h] of a latent [B, S, D]."""
  rows = no_rows(layer, latent)
  start = jnp.zeros(len(latent), jnp.int32)
  return gated_kv(latent, None, _projections(layer), tables, rows, start)[1]


def no_rows(layer: Layer, x: Array) -> Rows:
  """Room for the keys and values of x [B, S, D]."""
  attention = layer.block.attention
  kernel = attention.key.kernel[...]
  heads = kernel.shape[-1] // attention.head_width
  none = jnp.zeros((*x.shape[:2], heads, attention.head_width), x.dtype)
  return none, none


def mixture(alpha: Array, latent: Array, x: Array) -> Array:
  """alpha h + (1 - alpha) x: what keys and values are made of in phase 1.

  They are linear in it, so that this is the interpolation of both (section
  3.3), with one projection.
  """
  return _blend(x, latent, alpha)


def fixed_keep(mode: str, loop: Array) -> Array:
  """z of a mode without parameters, f32 scalar (section 4.4.1)."""
  loop = loop.astype(jnp.float32)
  keep = {
    "mean": loop / (loop + 1.0),
    "ema": jnp.full_like(loop, EMA_KEEP),
    "last": jnp.zeros_like(loop),
    "first": jnp.ones_like(loop),
  }
  return keep[mode]


def keep(layer: Layer, mode: str, loop: Array, x: Array, h: Array) -> Array:
  """z of a loop after the first, f32 [B, S, D], or [..., 1] or a scalar.

  Args:
    layer: its gate.
    mode: one of GATES. loop: from 0.
    x: [B, S, D]. h: the latent before the loop.
  """
  if mode in LEARNED:
    return reference.gate(x, h, _weights(layer))
  return fixed_keep(mode, loop)


def attend(
  layer: Layer,
  x: Array,
  tables: tuple[Array, Array],
  *parts: tuple[Array, Array, Array],
) -> Array:
  """The output of attention [B, S, D] to some parts, as `attend_to_parts`."""
  attention = layer.block.attention
  query = rope.rotate(attention.queries(x), tables).astype(x.dtype)
  return attention.merged(dot_product.attend_to_parts(query, *parts))


def _blend(x: Array, latent: Array, keep: Array) -> Array:
  """keep h + (1 - keep) x, for a scalar, in the dtype of x."""
  own, old = x.astype(keep.dtype), latent.astype(keep.dtype)
  return (own + keep * (old - own)).astype(x.dtype)


def _weights(layer: Layer) -> Weights:
  projections, gate = _projections(layer), layer.gate
  if gate is None:
    return projections
  compute = layer.block.attention.precision.compute
  return projections._replace(
    gate_input=gate.input.kernel[...].astype(compute),
    gate_latent=gate.latent.kernel[...].astype(compute),
    gate_bias=gate.bias[...],
  )


def _projections(layer: Layer) -> Weights:
  attention = layer.block.attention
  compute = attention.precision.compute
  key, value = (
    matrix.kernel[...].astype(compute)
    for matrix in (attention.key, attention.value)
  )
  return Weights(None, None, None, key, value)
