"""A cache of the first loop's keys and values, and a window of later loops'.

Source: Parallel Loop Transformer (arXiv 2510.24824, gated sliding-window
attention). It is as large as one loop's cache plus K - 1 windows per layer.
"""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.nn.attention.part import Part
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision


class WindowCache(NamedTuple):
  """Keys and values of earlier tokens; a slot is a layer in a loop.

  Attributes:
    first: those of the first loop of all tokens, a slot for every layer.
    recent: those of later loops, [(K - 1) L, B, G, w, d_h]; a token at position
      p is at place p modulo w, where the next token with this remainder
      replaces it.
  """

  first: Cache
  recent: KeyValues

  @property
  def num_slots(self) -> int:
    """Layers times loops."""
    return self.first.num_slots + len(self.recent.key)

  @property
  def capacity(self) -> int:
    """M, maximum number of tokens of a row."""
    return self.first.capacity

  @property
  def is_unstacked(self) -> bool:
    """See `Cache.is_unstacked`."""
    return False

  @property
  def window(self) -> int:
    """w, number of places of a later loop."""
    return self.recent.key.shape[3]

  def within(self, span: int | None) -> "WindowCache":
    """See `Cache.within`; windows are read whole."""
    return self._replace(first=self.first.within(span))

  def places(self, valid: Array) -> Array:
    """See `Cache.places`."""
    return self.first.places(valid)

  def visible(self, places: Array) -> Array:
    """See `Cache.visible`: of the first loop."""
    return self.first.visible(places)

  def visible_recent(self, places: Array) -> Array:
    """bool [B, S, w]: the places of a window that new tokens attend to.

    New tokens are not among those in a window, which is written last.

    Args:
      places: places of the new tokens, [B, S], which are their positions.
    """
    last = self.first.length[:, None] - 1
    # The newest position with the remainder of each place.
    newest = last - (last - jnp.arange(self.window)[None]) % self.window
    in_window = newest[:, None] > places[..., None] - self.window
    return in_window & (newest[:, None] >= 0)

  def write_first(
    self, layer: Array, key_values: KeyValues, places: Array
  ) -> "WindowCache":
    """Writes the first loop's keys and values of new tokens, see `Cache`."""
    return self._replace(first=self.first.write(layer, *key_values, places))

  def read_recent(self, slot: Array, visible: Array) -> Part:
    """The keys and values of a window; `slot` counts layers of later loops."""
    key, value = (jnp.swapaxes(x[slot], 1, 2) for x in self.recent)
    return Part(key, value, visible=visible)

  def last_tokens(self, places: Array) -> Array:
    """Indices of the new tokens that a window keeps, i32 [B, min(S, w)].

    Negative if a row has fewer.

    Args:
      places: places of the new tokens, [B, S]; a row's valid tokens are first.
    """
    size = min(places.shape[1], self.window)
    number = jnp.sum(places < self.capacity, axis=1, dtype=jnp.int32)
    return number[:, None] - size + jnp.arange(size)[None]

  def extended(self, recent: KeyValues | None, places: Array) -> "WindowCache":
    """The cache with windows and lengths that include new tokens.

    Args:
      recent: keys and values in later loops of the tokens `last_tokens`,
        [K - 1, L, B, min(S, w), G, d_h]; None without later loops.
      places: as in `last_tokens`.
    """
    first = self.first.extended(places)
    if recent is None:
      return self._replace(first=first)
    index = self.last_tokens(places)
    position = self.first.length[:, None] + index
    window_places = jnp.where(index >= 0, position % self.window, self.window)
    rows = jnp.arange(len(places))[:, None]

    def put(x: Array, new: Array) -> Array:
      new = jnp.transpose(new.reshape(-1, *new.shape[2:]), (1, 2, 0, 3, 4))
      return x.at[:, rows, :, window_places].set(new, mode="drop")

    windows = map(put, self.recent, recent)
    return WindowCache(first, KeyValues(*windows))


def empty(
  shape: Shape,
  num_layers: int,
  num_loops: int,
  window: int,
  batch: int,
  max_tokens: int,
  precision: Precision,
) -> WindowCache:
  """A cache without tokens, see `cache.empty`."""
  first = cache_lib.empty(shape, num_layers, batch, max_tokens, precision)
  slots = (num_loops - 1) * num_layers
  later = cache_lib.empty(shape, slots, batch, window, precision)
  return WindowCache(first, KeyValues(later.key, later.value))
