"""Short causal depthwise convolutions along a sequence."""

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.errors import UserError
from loopjax.nn import linear
from loopjax.types import Array, Precision

WIDTH = 4  # W, taps of the convolutions of memory layers.
_REDUCTION = 8  # Ratio of channels to hidden features of the tap generator.


class ShortConvolution(nnx.Module):
  """A depthwise convolution of width W, then silu.

  Taps and bias are initially uniform in [-1 / sqrt(W), 1 / sqrt(W)], as in
  PyTorch.
  """

  def __init__(
    self,
    channels: int,
    width: int,
    *,
    use_bias: bool = False,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    bound = width**-0.5
    self.taps = nnx.Param(
      jax.random.uniform(
        rngs.params(), (width, channels), precision.params, -bound, bound
      )
    )
    if use_bias:
      self.bias = nnx.Param(
        jax.random.uniform(
          rngs.params(), (channels,), precision.params, -bound, bound
        )
      )
    self.use_bias, self.precision = use_bias, precision

  def __call__(self, x: Array, tail: Array | None) -> Array:
    """Convolves x [B, T, C]; returns [B, T, C] in the compute dtype.

    tail: [B, W - 1, C], the inputs before x; zeros if None.
    """
    wide = self.precision.accumulate
    y = convolve(x.astype(wide), self.taps[...][None, None].astype(wide), tail)
    if self.use_bias:
      y += self.bias[...][None, None].astype(wide)
    return jax.nn.silu(y).astype(self.precision.compute)


class DynamicConvolution(nnx.Module):
  """A depthwise convolution with taps generated for every token, then silu.

    K[t] = W_2 silu(W_1 x_t) + b
    y[t, c] = sum_w K[t, w, c] v[t - W + 1 + w, c]

  (Jet-Nemotron, arXiv 2508.15884, section 3). Initially W_2 is zero and b
  selects the current token, which mixes no tokens. W_1 is not zero, or neither
  matrix would ever get a gradient.
  """

  def __init__(
    self,
    inputs: int,
    channels: int,
    width: int,
    *,
    init: linear.Initializer,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    if channels < _REDUCTION:
      raise UserError(
        f"{channels} value features over all heads are too few: the tap"
        f" generator has one hidden feature per {_REDUCTION} of them"
      )
    hidden = channels // _REDUCTION
    self.hidden = linear.linear(
      inputs, hidden, init=init, precision=precision, rngs=rngs
    )

    self.taps = linear.linear(
      hidden,
      width * channels,
      use_bias=True,
      init=nnx.initializers.zeros_init(),
      precision=precision,
      rngs=rngs,
    )
    assert self.taps.bias is not None
    bias = jnp.zeros((width, channels), precision.params).at[-1].set(1)
    self.taps.bias[...] = bias.ravel()  # The current token's tap.
    self.width = width
    self.precision = precision

  def __call__(self, x: Array, value: Array, tail: Array | None) -> Array:
    """Convolves value [B, T, C] with taps generated from x [B, T, D].

    Args:
      x: [B, T, D].
      value: [B, T, C].
      tail: [B, W - 1, C], the values before these; zeros if None.

    Returns:
      [B, T, C] in the compute dtype.
    """
    wide = self.precision.accumulate

    def run(x: Array, value: Array, tail: Array | None) -> Array:
      taps = self.taps(jax.nn.silu(self.hidden(x)))
      taps = taps.reshape(*x.shape[:2], self.width, -1).astype(wide)
      y = convolve(value.astype(wide), taps, tail)
      return jax.nn.silu(y).astype(self.precision.compute)

    # Recomputed: the taps are W times as large as the values.
    return jax.checkpoint(run)(x, value, tail)


def convolve(x: Array, taps: Array, tail: Array | None) -> Array:
  """y[t, c] = sum_w taps[t, w, c] x[t - W + 1 + w, c].

  Args:
    x: [B, T, C].
    taps: [B or 1, T or 1, W, C]; the last tap multiplies the current token.
    tail: [B, W - 1, C], the inputs before x; zeros if None.

  Returns:
    [B, T, C].
  """
  num_tokens, width = x.shape[1], taps.shape[2]
  if tail is None:
    x = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
  else:
    x = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
  y = taps[:, :, 0] * x[:, :num_tokens]
  for w in range(1, width):
    y += taps[:, :, w] * x[:, w : w + num_tokens]
  return y


def empty_tail(
  batch: int, channels: tuple[int, ...], precision: Precision
) -> tuple[Array, ...]:
  """Zeros [batch, WIDTH - 1, C] for each C in `channels`, compute dtype."""
  shapes = [(batch, WIDTH - 1, c) for c in channels]
  return tuple(jnp.zeros(shape, precision.compute) for shape in shapes)


def next_tail(
  inputs: tuple[Array, ...], tail: tuple[Array, ...] | None, mask: Array | None
) -> tuple[Array, ...] | None:
  """The last W - 1 inputs of each convolution after a window.

  Args:
    inputs: the inputs of each convolution in this window, [B, T, C].
    tail: the inputs before the window, [B, W - 1, C] each; if None, the result
      is None.
    mask: bool [B, T], False for padding, which must be at the end (see
      `layer.pack`); None without padding.

  Returns:
    [B, W - 1, C] for each convolution.
  """
  if tail is None:
    return None
  length = tail[0].shape[1]
  extended = [
    jnp.concatenate(x, axis=1) for x in zip(tail, inputs, strict=True)
  ]
  if mask is None:
    return tuple(x[:, x.shape[1] - length :] for x in extended)
  place = jnp.sum(mask, axis=1, keepdims=True) + jnp.arange(length)[None]
  return tuple(
    jnp.take_along_axis(x, place[..., None], axis=1) for x in extended
  )
