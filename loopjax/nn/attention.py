"""Multi-head attention over rotated queries and keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.nn import linear, norm, rope
from loopjax.types import Array, Precision


class Past(NamedTuple):
  """Keys and values of P tokens before a sequence, the oldest first.

  Attributes:
    key, value: [B, P, H, K]; keys are not rotated, since their positions are
      counted from where the next sequence begins.
  """

  key: Array
  value: Array


class Attention(nnx.Module):
  """Multi-head attention without biases.

  Queries and keys are rotated. With `qk_norm` they are RMS-normed per head with
  a learned gain before that (UTM, section 2.1). If `causal`, a token sees
  itself and those before it; else it sees all.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    *,
    causal: bool = False,
    qk_norm: bool = True,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}

    def square() -> nnx.Linear:
      return linear.linear(width, width, init=init, **shared)

    self.query, self.key, self.value = square(), square(), square()
    self.output = square()
    if qk_norm:
      self.query_norm = norm.rms_norm(width // num_heads, **shared)
      self.key_norm = norm.rms_norm(width // num_heads, **shared)
    self.num_heads = num_heads
    self.causal, self.qk_norm = causal, qk_norm
    self.precision = precision

  def __call__(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """x: [B, S, D], tables: from `rope_tables`; returns [B, S, D]."""
    query, key, value = self._rotated(x, tables)
    mixed = jax.nn.dot_product_attention(
      query, key, value, is_causal=self.causal
    )
    return self.output(mixed.reshape(x.shape))

  def behind(
    self, x: Array, past: Past, tables: tuple[Array, Array], visible: Array
  ) -> tuple[Array, Past]:
    """Attention to earlier tokens and to x itself.

    Args:
      x: [B, S, D].
      past: of P tokens before it; P may be 0.
      tables: from `rope_tables`, of P + S positions.
      visible: bool [B, S, P + S], the keys that a query sees; `causal` is not
        asked. A query that sees none gets some finite numbers.

    Returns:
      [B, S, D], and the keys and values of all P + S tokens.
    """
    own = self._keys(x)
    past = Past(*(jnp.concatenate(y, 1) for y in zip(past, own, strict=True)))
    num_past = past.key.shape[1] - x.shape[1]
    last = tables[0][num_past:], tables[1][num_past:]
    compute = self.precision.compute
    mixed = jax.nn.dot_product_attention(
      rope.rotate(self._queries(x), last).astype(compute),
      rope.rotate(past.key, tables).astype(compute),
      past.value,
      mask=visible[:, None],
    )
    return self.output(mixed.reshape(x.shape)), past

  def weights(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """The attention weights that `__call__` mixes with: f32 [B, H, S, S]."""
    query, key, _ = self._rotated(x, tables)
    logits = jnp.einsum(
      "bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32
    )
    if self.causal:
      visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
      logits = jnp.where(visible[None, None], logits, -jnp.inf)
    return jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1)

  def _heads(self, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], self.num_heads, -1)

  def _rotated(
    self, x: Array, tables: tuple[Array, Array]
  ) -> tuple[Array, Array, Array]:
    """Queries, keys and values [B, S, H, K], as they are compared and mixed."""
    compute, own = self.precision.compute, self._keys(x)
    return (
      rope.rotate(self._queries(x), tables).astype(compute),
      rope.rotate(own.key, tables).astype(compute),
      own.value,
    )

  def _queries(self, x: Array) -> Array:
    query = self._heads(self.query(x))
    return self.query_norm(query) if self.qk_norm else query

  def _keys(self, x: Array) -> Past:
    key = self._heads(self.key(x))
    value = self._heads(self.value(x))
    return Past(self.key_norm(key) if self.qk_norm else key, value)
