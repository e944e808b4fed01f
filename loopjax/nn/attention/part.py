"""A sequence of keys and values, and the mask of queries to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array


class Part(NamedTuple):
  """S keys and values; a query attends to those that all fields allow.

  Attributes:
    key, value: [B, S, G, d_h]; each is shared by H / G consecutive query heads.
    first: query t attends to keys 0 .. first + t; None allows all keys.
    reach: query t attends to at most the last `reach` of these keys; None
      allows all of them.
    documents: numbers of the queries and of the keys, i32 [B, T] and [B, S];
      queries attend to keys with the same number. None allows all keys.
    length: i32 scalar; only the first `length` keys are valid. None for all. If
      it is 0, other parts must have keys.
    visible: bool [B or 1, T, S], any other condition. A part with it is always
      computed by XLA.
  """

  key: Array
  value: Array
  first: int | None = None
  reach: int | None = None
  documents: tuple[Array, Array] | None = None
  length: Array | None = None
  visible: Array | None = None

  @property
  def num_keys(self) -> int:
    """S, the number of keys and values."""
    return self.key.shape[1]

  def is_causal(self, num_queries: int) -> bool:
    """Whether query t attends to keys 0 .. t, subject to the other fields."""
    reaches_all = self.reach is None or self.reach >= num_queries
    return self.first == 0 and reaches_all

  def is_of_queries(self, num_queries: int) -> bool:
    """Whether this is self-attention with one numbering of documents."""
    ids = self.documents
    return (
      (self.first is None or self.is_causal(num_queries))
      and (ids is None or ids[0] is ids[1])
      and self.length is None
      and self.visible is None
      and self.num_keys == num_queries
    )

  def mask(self, num_queries: int) -> Array | None:
    """What queries attend to, bool [B or 1, T, S]; None for all keys."""
    pairs = (1, num_queries, self.num_keys)
    key = jax.lax.broadcasted_iota(jnp.int32, pairs, 2)
    conditions = [] if self.visible is None else [self.visible]
    if self.first is not None:
      last = jax.lax.broadcasted_iota(jnp.int32, pairs, 1) + self.first
      conditions.append(key <= last)
      if self.reach is not None:
        conditions.append(key > last - self.reach)
    if self.documents is not None:
      of_queries, of_keys = self.documents
      conditions.append(of_queries[:, :, None] == of_keys[:, None])
    if self.length is not None:
      conditions.append(key < self.length)
    if not conditions:
      return None
    mask = conditions[0]
    for condition in conditions[1:]:
      mask = mask & condition
    return mask
