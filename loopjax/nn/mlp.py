"""Gated feed-forward layer."""

import jax
from flax import nnx

from loopjax.types import Array, Precision


class SwiGLU(nnx.Module):
  """W_o (silu(W_g x) * W_v x) without biases (arXiv 2002.05202)."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    def linear(inputs: int, outputs: int) -> nnx.Linear:
      return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=precision.compute,
        param_dtype=precision.params,
        rngs=rngs,
      )

    self.gate = linear(width, hidden_width)
    self.value = linear(width, hidden_width)
    self.output = linear(hidden_width, width)

  def __call__(self, x: Array) -> Array:
    """x: [..., D]; returns [..., D] in the compute dtype."""
    return self.output(jax.nn.silu(self.gate(x)) * self.value(x))
