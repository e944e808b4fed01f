"""Which keys a query attends to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

_HIDDEN = -1e30  # Finite, so that a query without keys has finite weights.


class Mask(NamedTuple):
  """The keys that each query attends to: those that all fields allow.

  Attributes:
    visible: bool [B or 1, T, S]; None allows all keys.
    query_documents, key_documents: i32 [B, T] and [B, S]; queries attend to
      keys with the same number. None allows all keys.
    start: i32 scalar; query t attends to keys 0 .. start + t. None allows all
      keys.
  """

  visible: Array | None = None
  query_documents: Array | None = None
  key_documents: Array | None = None
  start: Array | None = None

  def to_array(self, num_queries: int, num_keys: int) -> Array | None:
    """The mask as bool [B or 1, T, S]; None if all keys are allowed."""
    mask = self.visible
    if self.query_documents is not None:
      assert self.key_documents is not None
      same = self.query_documents[:, :, None] == self.key_documents[:, None]
      mask = same if mask is None else mask & same
    if self.start is not None:
      pairs = (1, num_queries, num_keys)
      place = jax.lax.broadcasted_iota(jnp.int32, pairs, 1) + self.start
      earlier = place >= jax.lax.broadcasted_iota(jnp.int32, pairs, 2)
      mask = earlier if mask is None else mask & earlier
    return mask


def hide(logits: Array, visible: Array) -> Array:
  """Logits [B, G, R T, S] with -1e30 where not `visible` [B or 1, T, S]."""
  by_head = logits.reshape(*logits.shape[:2], -1, *visible.shape[1:])
  by_head = jnp.where(visible[:, None, None], by_head, _HIDDEN)
  return by_head.reshape(logits.shape)
