"""Feed-forward layers."""

from typing import Any

import jax
from flax import nnx

from loopjax.nn import linear
from loopjax.types import Array, Precision


class SwiGLU(nnx.Module):
  """W_o (silu(W_g x) * W_v x) (arXiv 2002.05202)."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    use_bias: bool = False,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {
      "use_bias": use_bias,
      "init": init,
      "precision": precision,
      "rngs": rngs,
    }
    self.gate = linear.linear(width, hidden_width, **shared)
    self.value = linear.linear(width, hidden_width, **shared)
    self.output = linear.linear(hidden_width, width, **shared)

  def __call__(self, x: Array) -> Array:
    """x: [..., D]; returns [..., D] in the compute dtype."""
    return self.output(jax.nn.silu(self.gate(x)) * self.value(x))


class GELU(nnx.Module):
  """W_o gelu(W_v x); gelu by its tanh formula, as in GPT-2."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    use_bias: bool = False,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {
      "use_bias": use_bias,
      "init": init,
      "precision": precision,
      "rngs": rngs,
    }
    self.value = linear.linear(width, hidden_width, **shared)
    self.output = linear.linear(hidden_width, width, **shared)

  def __call__(self, x: Array) -> Array:
    """x: [..., D]; returns [..., D] in the compute dtype."""
    return self.output(jax.nn.gelu(self.value(x), approximate=True))


MLPS: dict[str, Any] = {"swiglu": SwiGLU, "gelu": GELU}
_NUM_MATRICES = {"swiglu": 3, "gelu": 2}


def flops(kind: str, width: int, hidden_width: int) -> int:
  """Forward FLOPs of one token; point-wise operations are left out."""
  return 2 * _NUM_MATRICES[kind] * width * hidden_width
