"""Caches of the keys and values of tokens that were read."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision

KINDS = ("per_loop", "last_loop", "first_loop", "mean")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "length", "weight"),
  meta_fields=("span",),
)
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values by slot; a slot is one layer in one loop.

  The rows of the batch are independent sequences. A row has M places. Its
  tokens are in the places before its length; the other places hold arbitrary
  values. The tokens of a head are contiguous in memory, which is the layout
  that the products of attention read.

  Attributes:
    key, value: [slots, B, G, M, d_h]; keys are rotated. If loops share keys and
      values, there is one slot per layer.
    length: i32 [B], number of tokens in each row.
    weight: f32 [K], weights with which loops update shared keys and values, see
      `loop_weights`; None if every loop has its own.
    span: N, number of places that attention reads; M if None.
  """

  key: Array
  value: Array
  length: Array
  weight: Array | None = None
  span: int | None = None

  @property
  def num_slots(self) -> int:
    """Layers times loops."""
    return len(self.key) * (1 if self.weight is None else len(self.weight))

  @property
  def capacity(self) -> int:
    """M, maximum number of tokens of a row."""
    return self.key.shape[3]

  def within(self, span: int | None) -> "Cache":
    """The same cache; attention reads only the first `span` places of a row.

    They must include all tokens of the rows to be continued, also the new ones.
    """
    span = None if span is None else min(span, self.capacity)
    return dataclasses.replace(self, span=span)

  def places(self, valid: Array) -> Array:
    """Places of new tokens, i32 [B, S]; M (out of range) where not `valid`."""
    after = self.length[:, None] + jnp.cumsum(valid, axis=1) - 1
    return jnp.where(valid, after, self.capacity)

  def positions(self, places: Array) -> Array:
    """Positions in the text of new tokens at places [B, S]."""
    return places

  def visible(self, places: Array) -> Array:
    """bool [B, S, N]: the places that new tokens at places [B, S] attend to."""
    return (
      jnp.arange(self.span or self.capacity)[None, None] <= places[..., None]
    )

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "Cache":
    """Writes keys and values [B, S, G, d_h] of a slot to places [B, S].

    If loops share them, w_k times these and (1 - w_k) times those of the loops
    before are written, where w_k is the weight of the loop.
    """
    assert slot is not None
    rows = jnp.arange(len(places))[:, None]
    if self.weight is not None:
      weight, slot = self.weight[slot // len(self.key)], slot % len(self.key)
      key = _blend(self.key[slot, rows, :, places], key, weight)
      value = _blend(self.value[slot, rows, :, places], value, weight)
    at = slot, rows, slice(None), places
    return dataclasses.replace(
      self,
      key=self.key.at[at].set(key, mode="drop"),
      value=self.value.at[at].set(value, mode="drop"),
    )

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """Keys and values of a slot, [B, G, N, d_h]."""
    assert slot is not None
    slot = slot if self.weight is None else slot % len(self.key)
    span = slice(self.span or self.capacity)
    return self.key[slot, :, :, span], self.value[slot, :, :, span]

  def extended(self, places: Array) -> "Cache":
    """The same cache; rows include the tokens written to places [B, S]."""
    added = jnp.sum(places < self.capacity, axis=1, dtype=jnp.int32)
    return dataclasses.replace(self, length=self.length + added)

  def cut(self, length: Array, rows: Array) -> "Cache":
    """The same cache; of `rows`, bool [B], only `length` tokens, i32 [B]."""
    length = jnp.where(rows, length, self.length)
    return dataclasses.replace(self, length=length)

  def with_skipped(
    self, num_loops: int, loops: Array, places: Array, own: "KeyValues | None"
  ) -> "Cache":
    """Writes keys and values for the loops that rows skipped.

    Args:
      num_loops: K.
      loops: i32 [B], number of loops that each row ran.
      places: i32 [B, S], places of the rows' tokens.
      own: the keys and values of every layer, the same for all skipped loops;
        None to copy those of the last loop that the row ran.
    """
    if self.weight is not None:
      return self  # Loops share keys and values; nothing is missing.
    rows = jnp.arange(len(places))[:, None]
    ran = jnp.arange(num_loops)[:, None] < loops[None]  # [K, B]
    from_loop = jnp.minimum(jnp.arange(num_loops)[:, None], loops[None] - 1)

    def filled(x: Array, own: Array | None) -> Array:
      # [K L, B, G, S, d_h]
      index = places[None, :, None, :, None]
      stored = jnp.take_along_axis(x, index, axis=3, mode="clip")
      stored = stored.reshape(num_loops, -1, *stored.shape[1:])
      by_row = (num_loops, 1, len(places), 1, 1, 1)
      if own is None:
        index = jnp.maximum(from_loop, 0).reshape(by_row)
        stored = jnp.take_along_axis(stored, index, axis=0)
      else:
        own = jnp.swapaxes(own, 2, 3)[None]
        stored = jnp.where(ran.reshape(by_row), stored, own)
      stored = stored.reshape(-1, *stored.shape[2:])
      stored = jnp.transpose(stored, (1, 3, 0, 2, 4))  # Rows and places first.
      return x.at[:, rows, :, places].set(stored, mode="drop")

    return dataclasses.replace(
      self,
      key=filled(self.key, own and own.key),
      value=filled(self.value, own and own.value),
    )


class SplitCache(NamedTuple):
  """Keys and values of every loop for prompts, shared ones for other tokens.

  Tokens that are read several at a time are prompts. The places of `prompt`
  precede those of `generated`.

  Attributes:
    prompt: cache with a slot for every layer in every loop.
    generated: cache with one slot per layer, shared by all loops.
  """

  prompt: Cache
  generated: Cache

  @property
  def num_slots(self) -> int:
    """Layers times loops."""
    return self.prompt.num_slots

  @property
  def capacity(self) -> int:
    """Number of places of both caches."""
    return self.prompt.capacity + self.generated.capacity

  def within(self, span: int | None) -> "SplitCache":
    """As in `Cache`, for each cache."""
    return SplitCache(self.prompt.within(span), self.generated.within(span))

  def places(self, valid: Array) -> Array:
    """As in `Cache`."""
    if valid.shape[1] > 1:
      places = self.prompt.places(valid)
      return jnp.where(places < self.prompt.capacity, places, self.capacity)
    return self.prompt.capacity + self.generated.places(valid)

  def positions(self, places: Array) -> Array:
    """As in `Cache`."""
    if places.shape[1] > 1:
      return places + self.generated.length[:, None]
    return places - self.prompt.capacity + self.prompt.length[:, None]

  def visible(self, places: Array) -> Array:
    """As in `Cache`."""
    prompt, rest = places, places - self.prompt.capacity
    if places.shape[1] > 1:
      rest = jnp.broadcast_to(self.generated.length[:, None] - 1, places.shape)
    else:
      prompt = self.prompt.length[:, None] - 1
    both = self.prompt.visible(prompt), self.generated.visible(rest)
    return jnp.concatenate(both, axis=2)

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "SplitCache":
    """As in `Cache`."""
    if places.shape[1] > 1:
      written = self.prompt.write(slot, key, value, places)
      return self._replace(prompt=written)
    at = places - self.prompt.capacity
    return self._replace(generated=self.generated.write(slot, key, value, at))

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """As in `Cache`; concatenates the two caches, which copies both."""
    both = zip(self.prompt.read(slot), self.generated.read(slot), strict=True)
    key, value = (jnp.concatenate(x, axis=2) for x in both)
    return key, value

  def extended(self, places: Array) -> "SplitCache":
    """As in `Cache`."""
    if places.shape[1] > 1:
      return self._replace(prompt=self.prompt.extended(places))
    at = places - self.prompt.capacity
    return self._replace(generated=self.generated.extended(at))

  def with_skipped(
    self, num_loops: int, loops: Array, places: Array, own: "KeyValues | None"
  ) -> "SplitCache":
    """Unchanged: only generated tokens skip loops, and loops share those."""
    del num_loops, loops, places, own
    return self


class KeyValues(NamedTuple):
  """Rotated keys, and values, of S tokens in L layers: [L, B, S, G, d_h]."""

  key: Array
  value: Array


def check(cache: Cache | SplitCache | None, num_slots: int) -> None:
  """Asserts that a cache, if there is one, has this number of slots."""
  assert cache is None or cache.num_slots == num_slots, cache.num_slots


def loop_weights(kind: str, num_loops: int) -> Array | None:
  """Weights w_k with which loop k updates shared keys and values, f32 [K].

  Args:
    kind: "per_loop": nothing is shared, the result is None; else the cache
      holds the keys and values of the "last_loop", of the "first_loop", or
      their "mean" over loops (MELT, arXiv 2605.07721, section 4.4.1 and
      appendix B).
    num_loops: K.
  """
  assert kind in KINDS, kind
  loop = jnp.arange(num_loops)
  return {
    "per_loop": None,
    "last_loop": jnp.ones(num_loops),
    "first_loop": (loop == 0).astype(jnp.float32),
    "mean": 1 / (1.0 + loop),
  }[kind]


def empty(
  shape: Shape,
  num_slots: int,
  batch: int,
  max_tokens: int,
  precision: Precision,
  weight: Array | None = None,
) -> Cache:
  """A cache without tokens.

  Args:
    shape: structure of the blocks.
    num_slots: layers times loops, or layers if there is a `weight`.
    batch: B.
    max_tokens: M.
    precision: keys and values have its compute dtype.
    weight: from `loop_weights`.
  """
  heads = shape.num_key_value_heads
  none = jnp.zeros(
    (num_slots, batch, heads, max_tokens, shape.head_width), precision.compute
  )
  return Cache(none, none, jnp.zeros(batch, jnp.int32), weight)


def _blend(old: Array, new: Array, weight: Array) -> Array:
  """(1 - weight) old + weight new, in f32; `old` may be NaN if weight is 1."""
  mixed = old.astype(jnp.float32) * (1 - weight) + new * weight
  return jnp.where(weight == 1, new, mixed.astype(new.dtype))
