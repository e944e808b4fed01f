"""KV caches: keys and values of earlier tokens."""

import dataclasses
import functools
from typing import Any, NamedTuple

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
  tokens occupy the places before its length; the other places hold arbitrary
  values. The tokens of a head are contiguous in memory, as the products of
  attention need them.

  Attributes:
    key, value: [slots, B, G, M, d_h]; keys are rotated. If loops share keys and
      values, there is one slot per layer. A tuple of arrays, one per slot, if
      `is_unstacked`.
    length: i32 [B], number of tokens in each row.
    weight: f32 [K], weights with which loops update shared keys and values, see
      `loop_weights`; None if each loop has its own keys and values.
    span: N, number of places that attention reads; M if None.
  """

  key: Any
  value: Any
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
    return self.key[0].shape[2] if self.is_unstacked else self.key.shape[3]

  @property
  def is_unstacked(self) -> bool:
    """Whether every slot is a separate array, see `of_rows`."""
    return isinstance(self.key, tuple)

  def within(self, span: int | None) -> "Cache":
    """The same cache; attention reads only the first `span` places of a row.

    They must include all tokens of the rows in use, including new ones.
    """
    span = None if span is None else min(span, self.capacity)
    return dataclasses.replace(self, span=span)

  def places(self, valid: Array) -> Array:
    """Places of new tokens, i32 [B, S]; M (out of range) where not `valid`.

    They are also their positions in the text.
    """
    after = self.length[:, None] + jnp.cumsum(valid, axis=1) - 1
    return jnp.where(valid, after, self.capacity)

  def visible(self, places: Array) -> Array:
    """bool [B, S, N]: the places that new tokens at places [B, S] attend to."""
    return (
      jnp.arange(self.span or self.capacity)[None, None] <= places[..., None]
    )

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "Cache":
    """Writes keys and values [B, S, G, d_h] of a slot to places [B, S].

    If loops share them, writes w_k times these plus (1 - w_k) times the stored
    ones, where w_k is the loop's weight.
    """
    assert slot is not None
    rows, weight = jnp.arange(len(places))[:, None], None
    if self.weight is not None:
      weight, slot = self.weight[slot // len(self.key)], slot % len(self.key)

    def written(slots: Any, new: Array) -> Any:
      index = rows, slice(None), places
      x, at = (
        (slots[slot], index) if self.is_unstacked else (slots, (slot, *index))
      )
      if weight is not None:
        new = _blend(x[at], new, weight)
      x = x.at[at].set(new, mode="drop")
      return (*slots[:slot], x, *slots[slot + 1 :]) if self.is_unstacked else x

    return dataclasses.replace(
      self, key=written(self.key, key), value=written(self.value, value)
    )

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """Keys and values of a slot: [B, G, N, d_h]."""
    assert slot is not None
    slot = slot if self.weight is None else slot % len(self.key)
    if self.is_unstacked:
      return self.key[slot], self.value[slot]
    span = slice(self.span or self.capacity)
    return self.key[slot, :, :, span], self.value[slot, :, :, span]

  def only(self, slot: int) -> "Cache":
    """A cache with one slot of this one, which `is_unstacked`."""
    loop, at = divmod(slot, len(self.key))
    weight = None if self.weight is None else self.weight[loop : loop + 1]
    return Cache((self.key[at],), (self.value[at],), self.length, weight)

  def with_only(self, slot: int, part: "Cache") -> "Cache":
    """This cache with a slot from `only`."""
    slot %= len(self.key)
    key, value = (
      (*slots[:slot], *new, *slots[slot + 1 :])
      for slots, new in ((self.key, part.key), (self.value, part.value))
    )
    return dataclasses.replace(self, key=key, value=value)

  def extended(self, places: Array) -> "Cache":
    """The same cache, with lengths that include the tokens at places [B, S]."""
    added = jnp.sum(places < self.capacity, axis=1, dtype=jnp.int32)
    return dataclasses.replace(self, length=self.length + added)

  def cut(self, length: Array, rows: Array) -> "Cache":
    """The same cache with `rows`, bool [B], truncated to `length`, i32 [B]."""
    length = jnp.where(rows, length, self.length)
    return dataclasses.replace(self, length=length)

  def of_rows(self, rows: Array, span: int | None, *, unstack: bool) -> "Cache":
    """A cache of some rows, i32 [R], with their first places only.

    Args:
      rows: an index out of range gives a row with arbitrary contents.
      span: number of places; M if None.
      unstack: whether every slot is a separate array; otherwise XLA's CPU
        compiler copies a slot before multiplying with it. Slot indices must
        then be known at compile time.
    """
    span = self.capacity if span is None else min(span, self.capacity)

    def taken(x: Array) -> Any:
      if unstack:
        slots = range(len(x))
        return tuple(x.at[i, rows, :, :span].get(mode="clip") for i in slots)
      return x.at[:, rows, :, :span].get(mode="clip")

    return Cache(
      taken(self.key),
      taken(self.value),
      self.length.at[rows].get(mode="clip"),
      self.weight,
    )

  def with_rows(self, part: "Cache", rows: Array, num_tokens: int) -> "Cache":
    """This cache, with the new tokens of some of its rows.

    Args:
      part: from `of_rows`, with at most `num_tokens` new tokens in each row.
      rows: the rows, i32 [R]; those out of range are ignored.
      num_tokens: static.
    """
    first = self.length.at[rows].get(mode="clip")[:, None]
    places = first + jnp.arange(num_tokens)[None]
    each = jnp.arange(len(rows))[:, None]

    def added(x: Array, new: Any) -> Array:
      # [R, num_tokens, slots, G, d_h]
      new = (
        jnp.stack([x.at[each, :, places].get(mode="clip") for x in new], axis=2)
        if part.is_unstacked
        else new.at[:, each, :, places].get(mode="clip")
      )
      return x.at[:, rows[:, None], :, places].set(new, mode="drop")

    return dataclasses.replace(
      self,
      key=added(self.key, part.key),
      value=added(self.value, part.value),
      length=self.length.at[rows].set(part.length, mode="drop"),
    )

  def with_skipped(
    self,
    num_loops: int,
    loops: Array,
    places: Array,
    key_values: "KeyValues | None",
  ) -> "Cache":
    """Writes keys and values for the loops that rows skipped.

    Args:
      num_loops: K.
      loops: i32 [B], number of loops that each row executed.
      places: i32 [B, S], places of the rows' tokens.
      key_values: of every layer, the same for all skipped loops; None to copy
        them from the row's last loop.
    """
    if self.weight is not None:
      return self  # Loops share keys and values: nothing to fill in.
    rows = jnp.arange(len(places))[:, None]
    ran = jnp.arange(num_loops)[:, None] < loops[None]  # [K, B]
    from_loop = jnp.minimum(jnp.arange(num_loops)[:, None], loops[None] - 1)

    def filled(x: Array, key_values: Array | None) -> Array:
      # [K L, B, G, S, d_h]
      index = places[None, :, None, :, None]
      stored = jnp.take_along_axis(x, index, axis=3, mode="clip")
      stored = stored.reshape(num_loops, -1, *stored.shape[1:])
      by_row = (num_loops, 1, len(places), 1, 1, 1)
      if key_values is None:
        index = jnp.maximum(from_loop, 0).reshape(by_row)
        stored = jnp.take_along_axis(stored, index, axis=0)
      else:
        key_values = jnp.swapaxes(key_values, 2, 3)[None]
        stored = jnp.where(ran.reshape(by_row), stored, key_values)
      stored = stored.reshape(-1, *stored.shape[2:])
      stored = jnp.transpose(stored, (1, 3, 0, 2, 4))  # Rows and places first.
      return x.at[:, rows, :, places].set(stored, mode="drop")

    return dataclasses.replace(
      self,
      key=filled(self.key, key_values and key_values.key),
      value=filled(self.value, key_values and key_values.value),
    )


class KeyValues(NamedTuple):
  """Keys and values of S tokens, [B, S, G, d_h], or of L layers [L, B, ...]."""

  key: Array
  value: Array


def check(cache: Any, num_slots: int) -> None:
  """Asserts that a cache, if there is one, has this number of slots."""
  assert cache is None or cache.num_slots == num_slots, cache.num_slots


def loop_weights(kind: str, num_loops: int) -> Array | None:
  """Weights w_k with which loop k updates shared keys and values, f32 [K].

  Args:
    kind: "per_loop": nothing is shared, and the result is None; otherwise the
      cache holds the keys and values of the "last_loop" or the "first_loop", or
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
  """(1 - weight) old + weight new, in f32; `old` may be NaN if weight = 1."""
  mixed = old.astype(jnp.float32) * (1 - weight) + new * weight
  return jnp.where(weight == 1, new, mixed.astype(new.dtype))
