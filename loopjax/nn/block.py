"""Pre-norm residual block."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import sharding
from loopjax.nn import attention, linear, mlp, norm
from loopjax.nn import dropout as dropout_lib
from loopjax.types import Array, Precision


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)).

  The residual stream stays in the accumulate dtype. What the two branches add
  is named "attention" and "mlp" for rematerialisation policies; in training a
  share of both is dropped.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    mlp_width: int,
    norm_kind: str,
    *,
    mlp_kind: str = "swiglu",
    causal: bool = False,
    qk_norm: bool = True,
    dropout: float = 0.0,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    make_norm = norm.NORMS[norm_kind]
    self.attention_norm = make_norm(width, **shared)
    self.attention = attention.Attention(
      width, num_heads, causal=causal, qk_norm=qk_norm, init=init, **shared
    )
    self.mlp_norm = make_norm(width, **shared)
    self.mlp = mlp.MLPS[mlp_kind](width, mlp_width, init=init, **shared)
    self.dropout, self.precision = dropout, precision

  def __call__(
    self, x: Array, tables: tuple[Array, Array], key: Array | None = None
  ) -> Array:
    """x: [B, S, D] residual stream, tables: rotary tables; same shape.

    key: of dropout; None for none.
    """
    x = sharding.by_example(x)
    return self._add(x, self.attention(self.attention_norm(x), tables), key)

  def behind(
    self,
    x: Array,
    past: attention.Past,
    tables: tuple[Array, Array],
    visible: Array,
  ) -> tuple[Array, attention.Past]:
    """The same with earlier tokens in sight, see `Attention.behind`."""
    x = sharding.by_example(x)
    normed = self.attention_norm(x)
    mixed, past = self.attention.behind(normed, past, tables, visible)
    return self._add(x, mixed), past

  def _add(self, x: Array, mixed: Array, key: Array | None = None) -> Array:
    """The residual stream with attention's output, and what the MLP adds."""
    x = x + self._branch(mixed, "attention", dropout_lib.fold(key, 0))
    added = self.mlp(self.mlp_norm(x))
    x = x + self._branch(added, "mlp", dropout_lib.fold(key, 1))
    return sharding.by_example(x)

  def _branch(self, x: Array, name: str, key: Array | None) -> Array:
    """What a branch adds, as the stream has it."""
    x = dropout_lib.dropout(checkpoint_name(x, name), self.dropout, key)
    return x.astype(self.precision.accumulate)

  def attention_weights(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """f32 [B, H, S, S]: where the block looks when given x."""
    return self.attention.weights(self.attention_norm(x), tables)
