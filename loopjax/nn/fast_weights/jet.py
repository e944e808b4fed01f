"""Jet block: fast weights with an input-dependent convolution of the values.

Jet-Nemotron (arXiv 2508.15884, section 3); used by the larger models of
"Language Models Need Sleep" (arXiv 2605.26099, section 6).
"""

from typing import Any

import jax
from flax import nnx

from loopjax.kernels import Kernels
from loopjax.nn import linear
from loopjax.nn.fast_weights import convolution
from loopjax.nn.fast_weights.gated_delta import GatedDeltaNet
from loopjax.nn.fast_weights.layer import (
  NORMAL,
  FastWeights,
  Gates,
  Packing,
  State,
  pack,
  unpack,
)
from loopjax.types import Array, Precision


class JetBlock(nnx.Module):
  """Fast weights; silu for q, k and v, a dynamic convolution for v."""

  initial_state = GatedDeltaNet.initial_state

  def __init__(
    self,
    width: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    *,
    gates: Gates = Gates(),
    init: linear.Initializer = NORMAL,
    kernels: Kernels = Kernels(),
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      width: D.
      num_heads: H.
      key_width: d_k of a head.
      value_width: d_v of a head.
      gates: initial values of the decay and write gates.
      init: initializer of every matrix, except W_2 of the convolution.
      kernels: the implementation of the gated delta rule.
      precision: dtypes of parameters, products and sums.
      rngs: random keys of the initial values.
    """
    shared: dict[str, Any] = {
      "init": init,
      "precision": precision,
      "rngs": rngs,
    }
    values = num_heads * value_width
    self.query = linear.linear(width, num_heads * key_width, **shared)
    self.key = linear.linear(width, num_heads * key_width, **shared)
    self.value = linear.linear(width, values, **shared)
    self.convolution = convolution.DynamicConvolution(
      width, values, convolution.WIDTH, **shared
    )
    self.fast_weights = FastWeights(
      width,
      num_heads,
      key_width,
      value_width,
      gates=gates,
      kernels=kernels,
      **shared,
    )
    self.channels = (values,)
    self.precision = precision

  def __call__(
    self, x: Array, state: State, packing: Packing | None = None
  ) -> tuple[Array, State, dict[str, Array]]:
    """As in `GatedDeltaNet`."""
    x, mask = pack(x, packing)
    query, key = jax.nn.silu(self.query(x)), jax.nn.silu(self.key(x))
    value = self.value(x)
    mixed = self.convolution(x, value, state.tail[0] if state.tail else None)
    y, fast, stats = self.fast_weights(x, query, key, mixed, state.fast, mask)
    tail = convolution.next_tail((value,), state.tail, mask)
    return unpack(y, packing), State(fast, tail), stats
