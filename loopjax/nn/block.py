"""The transformer block, and its FLOPs."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import sharding
from loopjax.kernels import Kernels
from loopjax.nn import attention, mlp
from loopjax.nn import keys as keys_lib
from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.nn.keys import fold_in
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision


class Block(nnx.Module):
  """x + post_norm(attention(norm(x))), then the same with the MLP.

  With `Shape.norm_sum`: post_norm(x + attention(norm(x))).

  The residual stream has the accumulate dtype. The outputs of attention and MLP
  are named "attention" and "mlp" for rematerialisation policies; dropout is
  applied to them if there are keys.
  """

  def __init__(
    self,
    shape: Shape,
    *,
    kernels: Kernels = Kernels(),
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    self.attention_norm = shape.norm(shape.width, **shared)
    self.attention = attention.Attention(shape, kernels=kernels, **shared)
    self.attention_post_norm = shape.post_norm(shape.width, **shared)
    self.mlp_norm = shape.norm(shape.width, **shared)
    self.mlp = make_mlp(shape, **shared)
    self.mlp_post_norm = shape.post_norm(shape.width, **shared)
    self.dropout, self.precision = shape.dropout, precision
    self.norm_sum = shape.norm_sum

  def __call__(
    self,
    x: Array,
    metadata: attention.Metadata,
    cache: Cache | None = None,
    slot: Array | None = None,
    *,
    keys: Array | None = None,
  ) -> tuple[Array, Cache | None]:
    """Applies the block to the residual stream.

    Args:
      x: [B, S, D].
      metadata, cache, slot: as in `Attention.__call__`.
      keys: random keys of dropout, [B]; None for no dropout.

    Returns:
      (output [B, S, D], the cache).
    """
    x = sharding.split_by_example(x)
    normalised = self.attention_norm(x)
    mixed, cache = self.attention(normalised, metadata, cache, slot)
    return self.add(x, mixed, keys), cache

  def attend_with_past(
    self,
    x: Array,
    past: KeyValues,
    tables: tuple[Array, Array],
    reach: int,
    mask: Array | None,
  ) -> tuple[Array, KeyValues]:
    """The block with `Attention.attend_with_past`; without dropout."""
    x = sharding.split_by_example(x)
    normalised = self.attention_norm(x)
    mixed, past = self.attention.attend_with_past(
      normalised, past, tables, reach, mask
    )
    return self.add(x, mixed), past

  def add(self, x: Array, mixed: Array, keys: Array | None = None) -> Array:
    """The rest of the block, given the output of attention.

    Args:
      x: the block's input [B, S, D].
      mixed: the output of attention [B, S, D].
      keys: random keys of dropout, [B]; None for no dropout.

    Returns:
      The residual stream after attention and MLP, [B, S, D].
    """
    mixed = checkpoint_name(mixed, "attention")
    x = self._added(x, mixed, self.attention_post_norm, fold_in(keys, 0))
    mixed = checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
    x = self._added(x, mixed, self.mlp_post_norm, fold_in(keys, 1))
    return sharding.split_by_example(x)

  def _added(
    self, x: Array, output: Array, post_norm: Any, keys: Array | None
  ) -> Array:
    """The residual stream plus a branch's output, in the stream's dtype."""
    output = output if self.norm_sum else post_norm(output)
    output = keys_lib.dropout(output, self.dropout, keys)
    x = x + output.astype(self.precision.accumulate)
    return post_norm(x) if self.norm_sum else x

  def keys_and_values(
    self, x: Array, metadata: attention.Metadata
  ) -> tuple[Array, Array]:
    """Rotated keys and values of the block's input x, [B, S, G, d_h] each."""
    return self.attention.keys_and_values(self.attention_norm(x), metadata)

  def attention_weights(self, x: Array, metadata: attention.Metadata) -> Array:
    """The attention weights for the block's input x, f32 [B, H, S, S]."""
    return self.attention.weights(self.attention_norm(x), metadata)


def make_mlp(shape: Shape, *, precision: Precision, rngs: nnx.Rngs) -> Any:
  """The MLP of a block: [..., D] to [..., D] in the compute dtype."""
  return mlp.MLPS[shape.mlp](
    shape.width,
    shape.mlp_width,
    init=shape.init,
    precision=precision,
    rngs=rngs,
  )


def flops(shape: Shape, num_tokens: int, num_past: int = 0) -> int:
  """FLOPs of a block's forward pass on one sequence.

  A multiply-add counts as two; point-wise operations, including biases, are not
  counted. Attention counts all pairs of tokens, including pairs with `num_past`
  earlier tokens and masked pairs, which are computed too.
  """
  queries = shape.num_heads * shape.head_width
  keys = shape.num_key_value_heads * shape.head_width
  projections = 2 * shape.width * (queries + keys)
  mixing = 2 * (num_past + num_tokens) * queries  # Logits, weighted sum.
  hidden = mlp.flops(shape.mlp, shape.width, shape.mlp_width)
  return num_tokens * (2 * (projections + mixing) + hidden)


def flops_by_loop(
  once: int, per_loop: int, num_loops: int, *, between: int = 0
) -> list[int]:
  """FLOPs of 1, ..., K loops, with what is done once and between two loops."""
  loops = range(1, num_loops + 1)
  return [once + k * per_loop + (k - 1) * between for k in loops]
