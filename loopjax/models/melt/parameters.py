"""The parameters of MELT's loops."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.kernels.gated_kv import Weights
from loopjax.models import causal
from loopjax.models.melt.config import Config
from loopjax.nn import block, linear
from loopjax.types import Array


class Gate(nnx.Module):
  """W_z, U_z and b_z of a learned gate, per feature or per token."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    features = config.width if config.gate == "element" else 1
    options = causal.matrix_options(config, rngs)
    self.input = linear.linear(config.width, features, **options)
    self.latent = linear.linear(config.width, features, **options)
    bias = jnp.full(features, config.gate_bias, options["precision"].params)
    self.bias = nnx.Param(bias)


class Layer(NamedTuple):
  """The parameters of one layer, or of all layers, stacked.

  Attributes:
    block: the block of a looped model.
    gate: None if the gate is fixed.
  """

  block: block.Block
  gate: Gate | None

  def projections(self) -> Weights:
    """W_K and W_V, in the compute dtype."""
    attention = self.block.attention
    key, value = map(self._matrix, (attention.key, attention.value))
    return Weights(None, None, None, key, value)

  def weights(self) -> Weights:
    """W_z, U_z, b_z of a learned gate, W_K and W_V."""
    assert self.gate is not None
    return self.projections()._replace(
      gate_input=self._matrix(self.gate.input),
      gate_latent=self._matrix(self.gate.latent),
      gate_bias=self.gate.bias[...],
    )

  def _matrix(self, projection: Any) -> Array:
    compute = self.block.attention.precision.compute
    return projection.kernel[...].astype(compute)


class Stack(NamedTuple):
  """The parameters of a loop: stacked layers, and the norm after them."""

  layers: Layer
  final_norm: Any

  @property
  def num_layers(self) -> int:
    """L, the number of layers."""
    return len(jax.tree.leaves(self.layers)[0])

  def no_latents(self, hidden: Array) -> Array:
    """Zeros for the latents of hidden [B, S, D]: [L, B, S, D]."""
    compute = self.layers.block.attention.precision.compute
    return jnp.zeros((self.num_layers, *hidden.shape), compute)

  def no_key_values(self, batch: int, num_tokens: int, *loops: int) -> Any:
    """Zeros for keys and values, [*loops, L, B, S, G, d_h] each."""
    attention = self.layers.block.attention
    columns = attention.key.kernel[...].shape[-1]
    heads = columns // attention.head_width, attention.head_width
    shape = (*loops, self.num_layers, batch, num_tokens, *heads)
    none = jnp.zeros(shape, attention.precision.compute)
    return none, none
