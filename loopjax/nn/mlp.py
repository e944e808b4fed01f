"""Feed-forward layers."""

from typing import Any

import jax
from flax import nnx

from loopjax.nn import linear
from loopjax.types import Array, Precision


class SwiGLU(nnx.Module):
  """W_o (silu(W_g x) * W_v x) without biases (arXiv 2002.05202)."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {
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
  """W_o gelu(W_v x) without biases; gelu by its tanh formula, as in GPT-2."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {
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
