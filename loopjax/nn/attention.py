"""Multi-head attention with normalised queries and keys."""

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.nn import linear, norm, rope
from loopjax.types import Array, Precision


class Attention(nnx.Module):
  """Bidirectional multi-head attention (UTM, section 2.1).

  Query, key, value and output projections have no bias; queries and keys are
  RMS-normed per head with a learned gain and then rotated.
  """

  def __init__(
    self,
    width: int,
    num_heads: int,
    *,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    def square() -> nnx.Linear:
      return linear.linear(width, width, precision=precision, rngs=rngs)

    self.query, self.key, self.value = square(), square(), square()
    self.output = square()
    head_width = width // num_heads
    self.query_norm = norm.rms_norm(head_width, precision=precision, rngs=rngs)
    self.key_norm = norm.rms_norm(head_width, precision=precision, rngs=rngs)
    self.num_heads = num_heads
    self.precision = precision

  def __call__(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """x: [B, S, D], tables: from `rope_tables`; returns [B, S, D]."""
    query, key = self._rotated(x, tables)
    value = self._heads(self.value(x))
    mixed = jax.nn.dot_product_attention(query, key, value)
    return self.output(mixed.reshape(x.shape))

  def weights(self, x: Array, tables: tuple[Array, Array]) -> Array:
    """The attention weights that `__call__` mixes with: f32 [B, H, S, S]."""
    query, key = self._rotated(x, tables)
    logits = jnp.einsum(
      "bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32
    )
    return jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1)

  def _heads(self, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], self.num_heads, -1)

  def _rotated(
    self, x: Array, tables: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    query = self.query_norm(self._heads(self.query(x)))
    key = self.key_norm(self._heads(self.key(x)))
    compute = self.precision.compute
    return (
      rope.rotate(query, tables).astype(compute),
      rope.rotate(key, tables).astype(compute),
    )
