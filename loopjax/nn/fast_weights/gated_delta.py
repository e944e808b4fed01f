"""Gated DeltaNet: fast weights with short convolutions of q, k and v.

Gated delta networks (arXiv 2412.06464), in the variant of the public
flash-linear-attention layer. The state is an argument and a result: callers
carry it over windows, and over passes over one window.
"""

from typing import Any

from flax import nnx

from loopjax.kernels import Kernels
from loopjax.nn import linear
from loopjax.nn.fast_weights import convolution
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


class GatedDeltaNet(nnx.Module):
  """Fast weights; convolutions and silu for queries, keys and values."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    *,
    num_key_heads: int | None = None,
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
      num_key_heads: H_k, number of heads of queries and keys, each shared by
        H / H_k value heads; H if None.
      gates: initial values of the decay and write gates.
      init: initializer of every matrix.
      kernels: the implementation of the gated delta rule.
      precision: dtypes of parameters, products and sums.
      rngs: random keys of the initial values.
    """
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    keys = (num_key_heads or num_heads) * key_width
    values = num_heads * value_width
    self.query = linear.linear(width, keys, init=init, **shared)
    self.key = linear.linear(width, keys, init=init, **shared)
    self.value = linear.linear(width, values, init=init, **shared)
    self.channels = (keys, keys, values)
    self.convolutions = nnx.List(
      [
        convolution.ShortConvolution(channels, convolution.WIDTH, **shared)
        for channels in self.channels
      ]
    )
    self.fast_weights = FastWeights(
      width,
      num_heads,
      key_width,
      value_width,
      gates=gates,
      init=init,
      kernels=kernels,
      **shared,
    )
    self.precision = precision

  def initial_state(
    self, batch: int, *, carry_convolutions: bool = False
  ) -> State:
    """The state before the first token.

    Args:
      batch: B.
      carry_convolutions: whether the state includes the convolutions' inputs.
        If true, results do not depend on how a sequence is split into windows;
        otherwise the convolutions start every window with zeros.
    """
    tail = convolution.empty_tail(batch, self.channels, self.precision)
    fast = self.fast_weights.initial(batch)
    return State(fast, tail if carry_convolutions else None)

  def __call__(
    self, x: Array, state: State, packing: Packing | None = None
  ) -> tuple[Array, State, dict[str, Array]]:
    """Applies the layer to a window of tokens.

    Args:
      x: [B, T, D], normalised.
      state: from `initial_state`, or returned for the previous window.
      packing: packing of the tokens that are not padding; None without padding.
        Padding does not affect other tokens or the state (bitwise), and its
        output is zero.

    Returns:
      (y [B, T, D] in the compute dtype, the state after the window, statistics
      as in `FastWeights`).
    """
    x, mask = pack(x, packing)
    inputs = (self.query(x), self.key(x), self.value(x))
    tails = state.tail or (None,) * len(inputs)
    query, key, value = (
      mix(channels, tail)
      for mix, channels, tail in zip(
        self.convolutions, inputs, tails, strict=True
      )
    )
    y, fast, stats = self.fast_weights(x, query, key, value, state.fast, mask)
    tail = convolution.next_tail(inputs, state.tail, mask)
    return unpack(y, packing), State(fast, tail), stats
