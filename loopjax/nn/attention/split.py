"""A cache with every loop of prompts, and loops shared for other tokens."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.types import Array


class SplitCache(NamedTuple):
  """Keys and values of every loop for prompts, shared ones for other tokens.

  Tokens processed several at a time are prompts. The places of `prompt` precede
  the places of `generated`.

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

  @property
  def is_unstacked(self) -> bool:
    """As in `Cache`."""
    return False

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
    prompt, generated = places, places - self.prompt.capacity
    if places.shape[1] > 1:
      generated = jnp.broadcast_to(
        self.generated.length[:, None] - 1, places.shape
      )
    else:
      prompt = self.prompt.length[:, None] - 1
    masks = self.prompt.visible(prompt), self.generated.visible(generated)
    return jnp.concatenate(masks, axis=2)

  def write(
    self, slot: Array | None, key: Array, value: Array, places: Array
  ) -> "SplitCache":
    """As in `Cache`."""
    if places.shape[1] > 1:
      written = self.prompt.write(slot, key, value, places)
      return self._replace(prompt=written)
    generated_places = places - self.prompt.capacity
    return self._replace(
      generated=self.generated.write(slot, key, value, generated_places)
    )

  def read(self, slot: Array | None) -> tuple[Array, Array]:
    """As in `Cache`; concatenates the two caches, which copies both."""
    pairs = zip(self.prompt.read(slot), self.generated.read(slot), strict=True)
    key, value = (jnp.concatenate(x, axis=2) for x in pairs)
    return key, value

  def extended(self, places: Array) -> "SplitCache":
    """As in `Cache`."""
    if places.shape[1] > 1:
      return self._replace(prompt=self.prompt.extended(places))
    generated_places = places - self.prompt.capacity
    return self._replace(generated=self.generated.extended(generated_places))

  def with_skipped(
    self,
    num_loops: int,
    loops: Array,
    places: Array,
    key_values: KeyValues | None,
  ) -> "SplitCache":
    """No change: only generated tokens skip loops; their slots are shared."""
    del num_loops, loops, places, key_values
    return self
