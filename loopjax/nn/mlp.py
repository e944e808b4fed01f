"""MLPs: gated and plain feed-forward layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from loopjax.nn import linear
from loopjax.types import Array, Precision


class Gated(nnx.Module):
  """Gated MLP W_o (activation(W_g x) * W_v x) (arXiv 2002.05202)."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    activation: Callable[[Array], Array],
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {
      "init": init,
      "precision": precision,
      "rngs": rngs,
    }
    # Hidden widths of 8/3 D are often not multiples of 8.
    wide, narrow = linear.wide_dot_general, linear.narrow_dot_general
    self.gate = linear.linear(width, hidden_width, dot_general=wide, **shared)
    self.value = linear.linear(width, hidden_width, dot_general=wide, **shared)
    self.output = linear.linear(
      hidden_width, width, dot_general=narrow, **shared
    )
    self.activation = activation

  @jax.named_scope("mlp")
  def __call__(self, x: Array) -> Array:
    """x: [..., D]; returns [..., D] in the compute dtype."""
    return self.output(self.activation(self.gate(x)) * self.value(x))


class Plain(nnx.Module):
  """MLP W_o activation(W_v x)."""

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    activation: Callable[[Array], Array],
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
    self.activation = activation

  @jax.named_scope("mlp")
  def __call__(self, x: Array) -> Array:
    """x: [..., D]; returns [..., D] in the compute dtype."""
    return self.output(self.activation(self.value(x)))


def gelu(x: Array) -> Array:
  """GELU with the tanh approximation, as in GPT-2 and Gemma."""
  return jax.nn.gelu(x, approximate=True)


MLPS: dict[str, Any] = {
  "swiglu": functools.partial(Gated, activation=jax.nn.silu),
  "geglu": functools.partial(Gated, activation=gelu),
  "gelu": functools.partial(Plain, activation=gelu),
}
_NUM_MATRICES = {"swiglu": 3, "geglu": 3, "gelu": 2}


def flops(kind: str, width: int, hidden_width: int) -> int:
  """FLOPs of a forward pass on one token, without point-wise operations."""
  return 2 * _NUM_MATRICES[kind] * width * hidden_width
