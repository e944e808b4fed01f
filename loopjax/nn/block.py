"""Pre-norm residual block."""

from flax import nnx

from loopjax.nn import attention, mlp, norm
from loopjax.types import Array, Precision


class Block(nnx.Module):
  """x + attention(norm(x)), then x + SwiGLU(norm(x)).

  The residual stream stays in the accumulate dtype.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    mlp_width: int,
    norm_kind: str,
    *,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    make_norm = norm.NORMS[norm_kind]
    self.attention_norm = make_norm(width, precision=precision, rngs=rngs)
    self.attention = attention.Attention(
      width, num_heads, precision=precision, rngs=rngs
    )
    self.mlp_norm = make_norm(width, precision=precision, rngs=rngs)
    self.mlp = mlp.SwiGLU(width, mlp_width, precision=precision, rngs=rngs)
    self.precision = precision

  def __call__(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """x: [B, S, D] residual stream, tables: rotary tables; same shape."""
    stream = self.precision.accumulate
    x = x + self.attention(self.attention_norm(x), tables).astype(stream)
    return x + self.mlp(self.mlp_norm(x)).astype(stream)

  def attention_weights(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """f32 [B, H, S, S]: where the block looks when given x."""
    return self.attention.weights(self.attention_norm(x), tables)
