"""A layer of MELT: it updates a latent per token and attends to their keys.

Section 3.2 of arXiv 2605.07721. The layer's input x is the normalised residual
stream. Queries are projections of x; keys and values are projections of the
latent h, which is x in the first loop and z h + (1 - z) x in later ones, with a
gate z. With z = 0 the layer is that of a looped model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.kernels.gated_kv import Weights, gated_kv, reference
from loopjax.models.melt.config import LEARNED, Config
from loopjax.nn import block, linear, rope
from loopjax.nn.attention.attend import attend_to
from loopjax.nn.attention.part import Part
from loopjax.types import PRECISIONS, Array

EMA_KEEP = 0.2  # The mean of the paper's learned gates (section 4.4.1).
KeyValues = tuple[Array, Array]  # Rotated keys, and values.


class Gate(nnx.Module):
  """Parameters of z = sigmoid(x W_z + h U_z + b_z), per feature or token."""

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
  """The gates of all layers, stacked; None if the gate is fixed."""
  if config.gate not in LEARNED:
    return None
  return jax.vmap(lambda key: Gate(config, rngs=nnx.Rngs(params=key)))(
    jax.random.split(rngs.params(), config.num_layers)
  )


class Layer(NamedTuple):
  """The parameters of one layer, or of all layers, stacked.

  Attributes:
    block: the block of a looped model.
    gate: None if the gate is fixed.
  """

  block: block.Block
  gate: Gate | None


def inputs(layer: Layer, hidden: Array) -> Array:
  """x = norm(residual stream [B, S, D]), in the compute dtype."""
  x = layer.block.attention_norm(hidden)
  return x.astype(layer.block.attention.precision.compute)


def update(
  layer: Layer,
  mode: str,
  loop: Array,
  x: Array,
  latent: Array,
  tables: tuple[Array, Array],
  buffers: KeyValues,
  start: Array,
) -> tuple[Array, KeyValues]:
  """Updates the latent and writes its keys and values to buffers.

  Args:
    layer: the layer's parameters.
    mode: one of GATES.
    loop: index of the loop, from 0, i32 scalar or [B, 1, 1].
    x: the layer's input [B, S, D].
    latent: the latent after the previous loop [B, S, D].
    tables: rotary tables [B, S, d_h / 2].
    buffers: buffers for keys and values, [B, N, G, d_h] each.
    start: i32 [B], the index along N of the first token; -1 writes nothing.

  Returns:
    (the latent after the loop [B, S, D], the buffers).
  """
  latent = jnp.where(loop == 0, x, latent)
  weights = _weights(layer)
  kernel = layer.block.attention.kernels.gated_kv
  run = functools.partial(gated_kv, implementation=kernel)
  if mode == "element":
    return run(x, latent, weights, tables, buffers, start)
  if mode == "scalar":
    latent = reference.blend(x, latent, weights)
  else:
    latent = _blend(x, latent, fixed_gate(mode, loop))
  return run(latent, None, _projections(layer), tables, buffers, start)


def project(
  layer: Layer, latent: Array, tables: tuple[Array, Array]
) -> KeyValues:
  """Rotated keys and values [B, S, G, d_h] of a latent [B, S, D]."""
  empty = empty_key_values(layer, latent)
  start = jnp.zeros(len(latent), jnp.int32)
  return gated_kv(latent, None, _projections(layer), tables, empty, start)[1]


def empty_key_values(layer: Layer, x: Array) -> KeyValues:
  """Zeros in the shape of the keys and values of x [B, S, D]."""
  attention = layer.block.attention
  kernel = attention.key.kernel[...]
  heads = kernel.shape[-1] // attention.head_width
  none = jnp.zeros((*x.shape[:2], heads, attention.head_width), x.dtype)
  return none, none


def interpolate(alpha: Array, latent: Array, x: Array) -> Array:
  """alpha h + (1 - alpha) x, the input of keys and values in phase 1.

  Keys and values are linear in their input, so that this interpolates both
  (section 3.3) with a single projection.
  """
  return _blend(x, latent, alpha)


def fixed_gate(mode: str, loop: Array) -> Array:
  """z of a fixed gate in loops >= 1, f32 like `loop` (section 4.4.1)."""
  loop = loop.astype(jnp.float32)
  values = {
    "mean": loop / (loop + 1.0),
    "ema": jnp.full_like(loop, EMA_KEEP),
    "last": jnp.zeros_like(loop),
    "first": jnp.ones_like(loop),
  }
  return values[mode]


def gate_values(
  layer: Layer, mode: str, loop: Array, x: Array, h: Array
) -> Array:
  """z of a loop after the first, f32 [B, S, D], [B, S, 1] or a scalar.

  Args:
    layer: the layer's parameters.
    mode: one of GATES.
    loop: index of the loop, from 0.
    x: the layer's input [B, S, D].
    h: the latent before the loop [B, S, D].
  """
  if mode in LEARNED:
    return reference.gate(x, h, _weights(layer))
  return fixed_gate(mode, loop)


def visible_parts(
  own: KeyValues,
  past: KeyValues | None,
  documents: tuple[Array, Array] | None,
  first: Array | int | None,
) -> list[Part]:
  """What a chunk's tokens attend to: its earlier ones, and what was written.

  Args:
    own: keys and values of the chunk [B, C, G, d_h].
    past: those of the history, or of its first rows, [B, N, G, d_h], of which
      `first` are written; None if there is one chunk.
    documents: numbers of the chunk's tokens i32 [B, C] and of the row's [B, T];
      None if a row is one document.
    first: index of the chunk's first token; None if the chunk is the row, whose
      tokens are read as chunks of one.
  """
  same = before = None
  if documents is not None:
    here, row = documents
    same = here, here
    before = None if past is None else (here, row[:, : past[0].shape[1]])
  if first is None:
    assert past is not None
    alone = Part(*own, first=0, reach=1, documents=same)
    return [alone, Part(*past, first=-1, documents=before)]
  parts = [Part(*own, first=0, documents=same)]
  if past is not None:
    written = jnp.asarray(first, jnp.int32)
    parts.append(Part(*past, documents=before, length=written))
  return parts


@jax.named_scope("attention")
def attend(
  layer: Layer,
  x: Array,
  tables: tuple[Array, Array],
  *parts: Part,
) -> Array:
  """The output of attention [B, S, D]; parts as in `attend_to`."""
  attention = layer.block.attention
  query = rope.rotate(attention.queries(x), tables).astype(x.dtype)
  implementation = attention.kernels.attention
  mixed = attend_to(query, *parts, implementation=implementation)
  return attention.merged(mixed)


def _blend(x: Array, latent: Array, keep: Array) -> Array:
  """keep latent + (1 - keep) x for a scalar `keep`, in the dtype of x."""
  own, old = x.astype(keep.dtype), latent.astype(keep.dtype)
  return (own + keep * (old - own)).astype(x.dtype)


def _weights(layer: Layer) -> Weights:
  projections, gate = _projections(layer), layer.gate
  if gate is None:
    return projections
  compute = layer.block.attention.precision.compute
  return projections._replace(
    gate_input=linear.dense(gate.input.kernel[...]).astype(compute),
    gate_latent=linear.dense(gate.latent.kernel[...]).astype(compute),
    gate_bias=gate.bias[...],
  )


def _projections(layer: Layer) -> Weights:
  attention = layer.block.attention
  compute = attention.precision.compute
  key, value = (
    linear.dense(matrix.kernel[...]).astype(compute)
    for matrix in (attention.key, attention.value)
  )
  return Weights(None, None, None, key, value)
