"""Fast weights: a matrix per head that tokens write to and read from.

The memory of "Language Models Need Sleep" (arXiv 2605.26099, section 3). This
module is shared by `gated_delta.GatedDeltaNet` and `jet.JetBlock`, which differ
in how they compute queries, keys and values.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.errors import UserError
from loopjax.kernels import Kernels
from loopjax.kernels.gated_delta import LONGEST_BY_TOKEN, gated_delta
from loopjax.nn import linear, norm
from loopjax.types import Array, Precision

NORMAL = nnx.initializers.normal(0.02)
# softplus(dt_bias) is initially log-uniform here, as in Mamba-2 (arXiv
# 2405.21060). `Gates.A_range` scales it: both together are the decay rate.
DT_RANGE = (1e-3, 0.1)


class State(NamedTuple):
  """The recurrent state of a layer.

  Attributes:
    fast: fast weights S, f32 [B, H, d_k, d_v].
    tail: the last W - 1 inputs of each convolution, [B, W - 1, C]; None if the
      convolutions start every window with zeros.
  """

  fast: Array
  tail: tuple[Array, ...] | None


@dataclasses.dataclass(frozen=True)
class Gates:
  """Initial values and range of the gates of fast weights.

  Attributes:
    A_range: exp(A_log) is initially uniform in this range, as in Mamba-2 (arXiv
      2405.21060). Its product with softplus(dt_bias) is the decay rate: at
      0.01, half of the state is forgotten after 69 tokens.
    negative_eigenvalues: whether write gates range up to 2 instead of 1, so
      that a token can flip the sign of the value that its key reads (arXiv
      2411.12537).
  """

  A_range: tuple[float, float] = (0.0, 16.0)
  negative_eigenvalues: bool = False

  def __post_init__(self) -> None:
    ends = self.A_range
    numbers = [x for x in ends if isinstance(x, float | int)]
    if len(numbers) != 2 or len(ends) != 2 or not 0 <= ends[0] < ends[1]:
      raise UserError(f"model.A_range={ends} must be 0 <= low < high")


class FastWeights(nnx.Module):
  """Gates, gated delta rule and gated output (arXiv 2412.06464).

  With x the layer's input and o the output of a head's delta rule,

    log_decay = -exp(A_log) softplus(W_a x + dt_bias)
    write = sigmoid(W_b x), or twice that with negative_eigenvalues
    y = W_o (RMSNorm(o) silu(W_g x)).

  In equation 3 of the paper on sleep (arXiv 2605.26099), exp(log_decay) is
  alpha, write is beta, and S is transposed. Gates and norm are computed in the
  accumulate dtype. A_log and dt_bias, one number per head each, are float32 for
  any `precision`.
  """

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
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}

    def logits() -> nnx.Linear:
      return linear.readout(
        width, num_heads, use_bias=False, init=init, **shared
      )

    def matrix(inputs: int, outputs: int) -> nnx.Linear:
      return linear.linear(inputs, outputs, init=init, **shared)

    def uniform(low: float, high: float) -> Array:
      shape = (num_heads,)
      return jax.random.uniform(rngs.params(), shape, jnp.float32, low, high)

    self.decay, self.write = logits(), logits()
    self.gate = matrix(width, num_heads * value_width)
    self.norm = norm.rms_norm(value_width, epsilon=1e-5, **shared)
    self.output = matrix(num_heads * value_width, width)
    rates = jnp.maximum(uniform(*gates.A_range), 1e-4)  # 0 has no logarithm.
    self.A_log = nnx.Param(jnp.log(rates))
    steps = jnp.exp(uniform(*np.log(DT_RANGE)))
    # The inverse of softplus.
    self.dt_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))
    self.shape = (num_heads, key_width, value_width)
    self.largest_write = 2 if gates.negative_eigenvalues else 1
    self.kernels, self.precision = kernels, precision

  def initial(self, batch: int) -> Array:
    """Fast weights before the first token: zeros, f32 [batch, H, d_k, d_v]."""
    wide = jnp.promote_types(jnp.float32, self.precision.accumulate)
    return jnp.zeros((batch, *self.shape), wide)

  @jax.named_scope("fast_weights")
  def __call__(
    self,
    x: Array,
    query: Array,
    key: Array,
    value: Array,
    fast: Array,
    mask: Array | None,
  ) -> tuple[Array, Array, dict[str, Array]]:
    """Every token of a window updates the fast weights, then queries them.

    Args:
      x: the layer's input [B, T, D].
      query, key: [B, T, H_k d_k].
      value: [B, T, H d_v].
      fast: fast weights before the window, [B, H, d_k, d_v].
      mask: bool [B, T], False for padding; None without padding.

    Returns:
      (y [B, T, D] in the compute dtype, the fast weights after the window,
      statistics). The statistics are "retention" f32 [B, H], the product of the
      window's decay gates: the fraction of `fast` that was not forgotten.
    """
    num_heads, key_width, value_width = self.shape
    query, key = (q.reshape(*q.shape[:2], -1, key_width) for q in (query, key))
    value = value.reshape(*value.shape[:2], num_heads, value_width)
    steps = jax.nn.softplus(self.decay(x) + self.dt_bias[...][None, None])
    log_decay = -jnp.exp(self.A_log[...])[None, None] * steps
    write = self.largest_write * jax.nn.sigmoid(self.write(x))
    # Kernels process chunks of tokens.
    by_chunk = x.shape[1] > LONGEST_BY_TOKEN
    read, fast = gated_delta(
      query,
      key,
      value,
      log_decay,
      write,
      fast,
      mask=mask,
      implementation=self.kernels.gated_delta if by_chunk else None,
    )
    gate = jax.nn.silu(self.gate(x).astype(self.precision.accumulate))
    y = self.output(self.norm(read).reshape(gate.shape) * gate)
    if mask is not None:
      log_decay = jnp.where(mask[..., None], log_decay, 0)
    return y, fast, {"retention": jnp.exp(jnp.sum(log_decay, axis=1))}


class Packing(NamedTuple):
  """A permutation that moves padding to the end of each row.

  No output depends on tokens at the end, even through convolutions.

  Attributes:
    mask: bool [B, T], False for padding, in the original order.
    packed_mask: bool [B, T], the mask after packing.
    order: i32 [B, T], index of the token at each place after packing.
    place: i32 [B, T], place after packing of each token that is not padding.
  """

  mask: Array
  packed_mask: Array
  order: Array
  place: Array


def packing(mask: Array) -> Packing:
  """The packing for a mask, bool [B, T], False for padding.

  Computed once for all layers and passes over the same tokens.
  """
  order = jnp.argsort(~mask, axis=1, stable=True)
  return Packing(
    mask=mask,
    packed_mask=jnp.take_along_axis(mask, order, axis=1),
    order=order,
    place=jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0),
  )


def pack(x: Array, packing: Packing | None) -> tuple[Array, Array | None]:
  """(x [B, T, D] packed, with zeros for padding; the packed mask, or None)."""
  if packing is None:
    return x, None
  order, inverse = _places(packing)
  return _moved(x, order, inverse), packing.packed_mask


def unpack(y: Array, packing: Packing | None) -> Array:
  """Restores the original order of y [B, T, D]; zeros at padding."""
  if packing is None:
    return y
  order, inverse = _places(packing)
  return _moved(y, inverse, order)


_Places = tuple[Array, Array]


def _places(packing: Packing) -> tuple[_Places, _Places]:
  """(indices to gather, mask) for packing, and for unpacking."""
  order = packing.order, packing.packed_mask
  return order, (packing.place, packing.mask)


@jax.custom_vjp
def _moved(x: Array, order: _Places, inverse: _Places) -> Array:
  """Moves tokens of x [B, T, D]; the gradient is also a gather."""
  del inverse
  source, mask = order
  x = jnp.take_along_axis(x, source[..., None], axis=1)
  return jnp.where(mask[..., None], x, 0)


def _moved_forward(x: Array, order: _Places, inverse: _Places) -> Any:
  return _moved(x, order, inverse), (order, inverse)


def _moved_backward(places: tuple[_Places, _Places], cotangent: Array) -> Any:
  order, inverse = places
  return _moved(cotangent, inverse, order), None, None


_moved.defvjp(_moved_forward, _moved_backward)
