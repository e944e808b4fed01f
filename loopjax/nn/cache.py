"""Keys and values of the tokens that were read."""

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
  """Keys and values; a slot is one layer in one loop.

  A row is a sequence of its own: the places before its length hold its tokens,
  one after another; what lies in the others is arbitrary. A head's tokens lie
  one after another, as the products of attention read them.

  Attributes:
    key, value: [slots, B, G, M, d_h], for M tokens at most; keys are rotated.
      Where loops share them there are as many slots as layers.
    length: i32 [B], tokens of each row.
    weight: f32 [K], of what a loop makes of a token in what is kept of it; None
      if every loop's is kept.
    span: N, the places that attention looks at; M if None.
  """

  key: Array
  value: Array
  length: Array
  weight: Array | None = None
  span: int | None = None

  @property
  def num_slots(self) -> int:
    """Layers by loops."""
    return len(self.key) * (1 if self.weight is None else len(self.weight))

  @property
  def room(self) -> int:
    """M."""
    return self.key.shape[3]

  def within(self, span: int | None) -> "Cache":
    """The same, of which attention looks at the first `span` places alone.

    They must hold all tokens of the rows that are read on, new ones included.
    """
    span = None if span is None else min(span, self.room)
    return dataclasses.replace(self, span=span)

  def places(self, valid: Array) -> Array:
    """Where new tokens go, i32 [B, S]; M, which is nowhere, unless `valid`."""
    after = self.length[:, None] + jnp.cumsum(valid, axis=1) - 1
    return jnp.where(valid, after, self.room)

  def positions(self, places: Array) -> Array:
    """Of new tokens at places [B, S] in their text."""
    return places

  def visible(self, places: Array) -> Array:
    """bool [B, S, N], what new tokens at places [B, S] see."""
    return jnp.arange(self.span or self.room)[None, None] <= places[..., None]

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "Cache":
    """Puts keys and values [B, S, G, d_h] of a slot at places [B, S].

    Where loops share them: what there is of the loops before, and these, by the
    loop's weight.
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
    span = slice(self.span or self.room)
    return self.key[slot, :, :, span], self.value[slot, :, :, span]

  def longer(self, places: Array) -> "Cache":
    """The same, with rows that end after what was written at [B, S]."""
    added = jnp.sum(places < self.room, axis=1, dtype=jnp.int32)
    return dataclasses.replace(self, length=self.length + added)

  def with_skipped(
    self, num_loops: int, loops: Array, places: Array, own: "Kept | None"
  ) -> "Cache":
    """Fills in the loops that tokens skipped.

    Args:
      num_loops: K.
      loops: i32 [B], loops that a row ran.
      places: i32 [B, S], of its tokens.
      own: of every layer, for all loops that are skipped; None for those of the
        last loop that ran.
    """
    if self.weight is not None:
      return self  # What the loops that ran have left.
    rows = jnp.arange(len(places))[:, None]
    ran = jnp.arange(num_loops)[:, None] < loops[None]  # [K, B]
    from_loop = jnp.minimum(jnp.arange(num_loops)[:, None], loops[None] - 1)

    def filled(x: Array, own: Array | None) -> Array:
      # [K L, B, G, S, d_h]
      index = places[None, :, None, :, None]
      there = jnp.take_along_axis(x, index, axis=3, mode="clip")
      there = there.reshape(num_loops, -1, *there.shape[1:])
      by_row = (num_loops, 1, len(places), 1, 1, 1)
      if own is None:
        index = jnp.maximum(from_loop, 0).reshape(by_row)
        there = jnp.take_along_axis(there, index, axis=0)
      else:
        own = jnp.swapaxes(own, 2, 3)[None]
        there = jnp.where(ran.reshape(by_row), there, own)
      there = there.reshape(-1, *there.shape[2:])
      there = jnp.transpose(there, (1, 3, 0, 2, 4))  # Rows and places first.
      return x.at[:, rows, :, places].set(there, mode="drop")

    return dataclasses.replace(
      self,
      key=filled(self.key, own and own.key),
      value=filled(self.value, own and own.value),
    )


class Prompted(NamedTuple):
  """A cache that keeps every loop of prompts, and shares the rest.

  Tokens that are read several at a time are prompts; their places come first.

  Attributes:
    prompt: of every loop. rest: shared by all loops.
  """

  prompt: Cache
  rest: Cache

  @property
  def num_slots(self) -> int:
    """Layers by loops."""
    return self.prompt.num_slots

  @property
  def room(self) -> int:
    """Places of both."""
    return self.prompt.room + self.rest.room

  def within(self, span: int | None) -> "Prompted":
    """As in `Cache`, of each."""
    return Prompted(self.prompt.within(span), self.rest.within(span))

  def places(self, valid: Array) -> Array:
    """As in `Cache`."""
    if valid.shape[1] > 1:
      places = self.prompt.places(valid)
      return jnp.where(places < self.prompt.room, places, self.room)
    return self.prompt.room + self.rest.places(valid)

  def positions(self, places: Array) -> Array:
    """As in `Cache`."""
    if places.shape[1] > 1:
      return places + self.rest.length[:, None]
    return places - self.prompt.room + self.prompt.length[:, None]

  def visible(self, places: Array) -> Array:
    """As in `Cache`."""
    prompt, rest = places, places - self.prompt.room
    if places.shape[1] > 1:
      rest = jnp.broadcast_to(self.rest.length[:, None] - 1, places.shape)
    else:
      prompt = self.prompt.length[:, None] - 1
    both = self.prompt.visible(prompt), self.rest.visible(rest)
    return jnp.concatenate(both, axis=2)

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "Prompted":
    """As in `Cache`."""
    if places.shape[1] > 1:
      written = self.prompt.write(slot, key, value, places)
      return self._replace(prompt=written)
    at = places - self.prompt.room
    return self._replace(rest=self.rest.write(slot, key, value, at))

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """As in `Cache`; one after the other, which copies both."""
    both = zip(self.prompt.read(slot), self.rest.read(slot), strict=True)
    key, value = (jnp.concatenate(x, axis=2) for x in both)
    return key, value

  def longer(self, places: Array) -> "Prompted":
    """As in `Cache`."""
    if places.shape[1] > 1:
      return self._replace(prompt=self.prompt.longer(places))
    at = places - self.prompt.room
    return self._replace(rest=self.rest.longer(at))

  def with_skipped(
    self, num_loops: int, loops: Array, places: Array, own: "Kept | None"
  ) -> "Prompted":
    """As in `Cache`: what is read one at a time is shared."""
    del num_loops, loops, places, own
    return self


class Kept(NamedTuple):
  """Keys, rotated, and values of some tokens: [L, B, S, G, d_h]."""

  key: Array
  value: Array


def check(cache: Cache | Prompted | None, num_slots: int) -> None:
  """A cache, if there is one, was made for as many loops as now run."""
  assert cache is None or cache.num_slots == num_slots, cache.num_slots


def weights(kind: str, num_loops: int) -> Array | None:
  """What each loop makes of a token in what is kept of it, f32 [K].

  Args:
    kind: "per_loop", None: every loop's keys and values are kept; or loops
      share them: those of the "last_loop", of the "first_loop", or the "mean"
      (MELT, arXiv 2605.07721, section 4.4.1 and appendix B).
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
  """A cache of rows without tokens; slots are layers if there is a weight."""
  heads = shape.num_key_value_heads
  none = jnp.zeros(
    (num_slots, batch, heads, max_tokens, shape.head_width), precision.compute
  )
  return Cache(none, none, jnp.zeros(batch, jnp.int32), weight)


def _blend(old: Array, new: Array, weight: Array) -> Array:
  """(1 - weight) old + weight new, in f32; of anything old where it is 1."""
  mixed = old.astype(jnp.float32) * (1 - weight) + new * weight
  return jnp.where(weight == 1, new, mixed.astype(new.dtype))
