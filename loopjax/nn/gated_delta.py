"""Gated DeltaNet: fast weights fed by three short convolutions.

Gated delta networks (arXiv 2412.06464), with the choices of the public
flash-linear-attention layer. The state is an argument and a result, so that a
caller can carry it over windows, and over passes of one window.
"""

from typing import Any

from flax import nnx

from loopjax.nn import convolution, linear
from loopjax.nn.fast_weights import (
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
  """Fast weights; queries, keys and values pass a convolution and silu."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    *,
    num_key_heads: int | None = None,
    convolution_width: int = 4,
    gates: Gates = Gates(),
    init: linear.Initializer = NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      width: D.
      num_heads: H.
      key_width: d_k, of a head.
      value_width: d_v, of a head.
      num_key_heads: H_k, heads of queries and keys, each shared by H / H_k
        value heads; H if None.
      convolution_width: W, tokens that a convolution sees.
      gates: initial values of the decay and write gates.
      init: of every matrix.
      precision: of parameters, products and sums.
      rngs: for the initial values.
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
        convolution.ShortConvolution(channels, convolution_width, **shared)
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
      **shared,
    )
    self.convolution_width = convolution_width
    self.precision = precision

  def initial_state(
    self, batch: int, *, carry_convolutions: bool = False
  ) -> State:
    """The state before the first token.

    Args:
      batch: B.
      carry_convolutions: from window to window, so that any split of a sequence
        gives the same result; else every window starts with zeros.
    """
    tail = convolution.empty_tail(
      batch, self.convolution_width, self.channels, self.precision
    )
    fast = self.fast_weights.initial(batch)
    return State(fast, tail if carry_convolutions else None)

  def __call__(
    self, x: Array, state: State, packing: Packing | None = None
  ) -> tuple[Array, State, dict[str, Array]]:
    """Reads a window of tokens.

    Args:
      x: [B, T, D], normalised.
      state: from `initial_state`, or from the window before.
      packing: of the tokens that are there; any other is invisible to them,
        leaves the state bit-identical, and its output is zero. None for all.

    Returns:
      y [B, T, D] in the compute dtype, the state after the window, and
      statistics as from FastWeights.
    """
    x, seen = pack(x, packing)
    inputs = (self.query(x), self.key(x), self.value(x))
    tails = state.tail or (None,) * len(inputs)
    query, key, value = (
      mix(channels, tail)
      for mix, channels, tail in zip(
        self.convolutions, inputs, tails, strict=True
      )
    )
    y, fast, stats = self.fast_weights(x, query, key, value, state.fast, seen)
    tail = convolution.next_tail(inputs, state.tail, seen)
    return unpack(y, packing), State(fast, tail), stats
