"""Keys and values of the tokens that were read."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision

KINDS = ("per_loop", "last_loop", "first_loop", "mean")


class Cache(NamedTuple):
  """Keys and values; a slot is one layer in one loop.

  A row is a sequence of its own: the places before its length hold its tokens,
  one after another; what lies in the others is arbitrary.

  Attributes:
    key, value: [slots, B, M, G, d_h], for M tokens at most; keys are rotated.
      Where loops share them there are as many slots as layers.
    length: i32 [B], tokens of each row.
    weight: f32 [K], of what a loop makes of a token in what is kept of it; None
      if every loop's is kept.
  """

  key: Array
  value: Array
  length: Array
  weight: Array | None = None

  @property
  def num_slots(self) -> int:
    """Layers by loops."""
    return len(self.key) * (1 if self.weight is None else len(self.weight))

  def places(self, valid: Array) -> Array:
    """Where new tokens go, i32 [B, S]; M, which is nowhere, unless `valid`."""
    after = self.length[:, None] + jnp.cumsum(valid, axis=1) - 1
    return jnp.where(valid, after, self.key.shape[2])

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
      key = _blend(self.key[slot, rows, places], key, weight)
      value = _blend(self.value[slot, rows, places], value, weight)
    at = slot, rows, places
    return self._replace(
      key=self.key.at[at].set(key, mode="drop"),
      value=self.value.at[at].set(value, mode="drop"),
    )

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """Keys and values of a slot, [B, M, G, d_h]."""
    assert slot is not None
    slot = slot if self.weight is None else slot % len(self.key)
    return self.key[slot], self.value[slot]

  def longer(self, places: Array) -> "Cache":
    """The same, with rows that end after what was written at [B, S]."""
    added = jnp.sum(places < self.key.shape[2], axis=1, dtype=jnp.int32)
    return self._replace(length=self.length + added)

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
      there = x[:, rows, places]  # [K L, B, S, G, d_h]; clipped if nowhere.
      there = there.reshape(num_loops, -1, *there.shape[1:])
      by_row = (num_loops, 1, len(places), 1, 1, 1)
      if own is None:
        index = jnp.maximum(from_loop, 0).reshape(by_row)
        there = jnp.take_along_axis(there, index, axis=0)
      else:
        there = jnp.where(ran.reshape(by_row), there, own[None])
      there = there.reshape(-1, *there.shape[2:])
      return x.at[:, rows, places].set(there, mode="drop")

    return self._replace(
      key=filled(self.key, own and own.key),
      value=filled(self.value, own and own.value),
    )


class Kept(NamedTuple):
  """Keys, rotated, and values of some tokens: [L, B, S, G, d_h]."""

  key: Array
  value: Array


def check(cache: Cache | None, num_slots: int) -> None:
  """A cache, if there is one, was made for as many loops as now run."""
  assert cache is None or cache.num_slots == num_slots, cache.key.shape


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
  heads = (shape.num_key_value_heads, shape.head_width)
  none = jnp.zeros((num_slots, batch, max_tokens, *heads), precision.compute)
  return Cache(none, none, jnp.zeros(batch, jnp.int32), weight)


def _blend(old: Array, new: Array, weight: Array) -> Array:
  """(1 - weight) old + weight new, in f32; of anything old where it is 1."""
  mixed = old.astype(jnp.float32) * (1 - weight) + new * weight
  return jnp.where(weight == 1, new, mixed.astype(new.dtype))
