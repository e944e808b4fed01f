"""The structure of a transformer block."""

import dataclasses
from typing import Any

from loopjax import checks
from loopjax.errors import UserError
from loopjax.nn import linear
from loopjax.nn import mlp as mlp_lib
from loopjax.nn import norm as norm_lib


@dataclasses.dataclass(frozen=True)
class Shape:
  """The structure of a transformer block of any family.

  For example, Ouro's block (arXiv 2510.25741) has `norm.rms_norm` as both
  `norm` and `post_norm`; GPT-2's has layer norms and "gelu".

  Attributes:
    width: D.
    num_heads: H, number of query heads.
    num_key_value_heads: G, each shared by H / G consecutive query heads (arXiv
      2305.13245); with G = H this is multi-head attention.
    head_width: d_h; even, because features are rotated in pairs.
    mlp_width: F, number of hidden features of the MLP.
    mlp: kind of MLP, a key of `mlp.MLPS`.
    norm: norm of the input of attention and MLP.
    post_norm: norm of their output; together with `norm`, a "sandwich" norm.
    norm_sum: whether `post_norm` instead normalises the sum of the residual
      stream and the output (Huginn, arXiv 2502.05171).
    qk_norm: norm of each head's queries and keys, before the rotation.
    qk_bias: whether the projections of queries and keys have biases.
    value_bias: whether the projection of values has a bias.
    causal: whether tokens attend only to themselves and earlier tokens.
    dropout: dropout rate on the outputs of attention and MLP, in training.
    init: initializer of every matrix; biases are initially zero.
  """

  width: int
  num_heads: int
  num_key_value_heads: int
  head_width: int
  mlp_width: int
  mlp: str = "swiglu"
  norm: norm_lib.MakeNorm = norm_lib.rms_norm
  post_norm: norm_lib.MakeNorm = norm_lib.identity
  norm_sum: bool = False
  qk_norm: norm_lib.MakeNorm = norm_lib.identity
  qk_bias: bool = False
  value_bias: bool = False
  causal: bool = False
  dropout: float = 0.0
  init: linear.Initializer = linear.LECUN_NORMAL

  def __post_init__(self) -> None:
    checks.one_of("model", self, mlp=mlp_lib.MLPS)
    checks.at_least(
      "model", self, width=1, num_heads=1, num_key_value_heads=1, mlp_width=1
    )
    if self.num_heads % self.num_key_value_heads:
      raise UserError(
        f"model.num_heads={self.num_heads} must be a multiple of"
        f" model.num_key_value_heads={self.num_key_value_heads}"
      )
    if self.head_width < 2 or self.head_width % 2:
      raise UserError(f"model.head_width={self.head_width} must be even")
    checks.within("model", self, dropout="[0, 1)")


def multi_head(
  width: int, num_heads: int, mlp_ratio: float, **options: Any
) -> Shape:
  """G = H heads of width D / H, and F = floor(mlp_ratio D)."""
  return Shape(
    width,
    num_heads,
    num_key_value_heads=num_heads,
    head_width=head_width(width, num_heads),
    mlp_width=mlp_width(width, mlp_ratio),
    **options,
  )


def head_width(width: int, num_heads: int) -> int:
  """d_h = D / H; raises UserError unless it is an even integer."""
  if num_heads < 1 or width < 1 or width % (2 * num_heads):
    raise UserError(
      f"model.width={width} must be a multiple of twice"
      f" model.num_heads={num_heads}, both at least 1"
    )
  return width // num_heads


def mlp_width(width: int, ratio: float) -> int:
  """F = floor(ratio D); raises UserError if it is zero."""
  features = int(width * ratio)
  if features < 1:
    raise UserError(f"model.mlp_ratio={ratio} gives an MLP of width 0")
  return features
