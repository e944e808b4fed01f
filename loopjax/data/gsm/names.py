"""Names of quantities.

An example has a theme, and a grid of some of the theme's items and places.
A place with a total has no items except those that the total counts.
"""

from typing import NamedTuple

import numpy as np

from loopjax.data.gsm import language, words
from loopjax.data.gsm.config import NUM_TOTAL_PLACES, Config
from loopjax.data.gsm.language import ABSENT, TOTAL
from loopjax.data.gsm.structures import MAX_NODES


class Names(NamedTuple):
  """Names of quantities.

  Attributes:
    themes: int [B].
    items, places: items and places of quantities that are neither totals nor
      counted by one, in order, int [B, num_names].
    counted_items: items that a total counts, by node of their problem, int [B,
      8].
    total_places: places that have only such items, int [B, 16].
  """

  themes: np.ndarray
  items: np.ndarray
  places: np.ndarray
  counted_items: np.ndarray
  total_places: np.ndarray


def num_columns(config: Config) -> int:
  """Number of uniform numbers that `draw` needs per example."""
  return 1 + words.NUM_ITEMS + words.NUM_PLACES + config.grid_side**2


def draw(config: Config, numbers: np.ndarray) -> Names:
  """Names from uniform numbers [B, num_columns]."""
  ends = np.cumsum([1, words.NUM_ITEMS, words.NUM_PLACES])
  theme, *keys = np.split(numbers, ends, axis=1)
  items, places, cells = (
    np.argsort(part, axis=1, kind="stable") for part in keys
  )
  row, column = np.divmod(cells[:, : config.num_names], config.grid_side)
  return Names(
    themes=(theme[:, 0] * len(words.THEMES)).astype(np.int64),
    items=np.take_along_axis(items, column, axis=1),
    places=np.take_along_axis(places, NUM_TOTAL_PLACES + row, axis=1),
    counted_items=items[:, :MAX_NODES],
    total_places=places[:, :NUM_TOTAL_PLACES],
  )


def titles(names: Names) -> np.ndarray:
  """Numbers of the names of node 0 as a total and as an item, int [B, 2]."""
  items = np.stack([np.full_like(names.themes, -1), names.items[:, 0]], axis=1)
  places = np.stack([names.total_places[:, 0], names.places[:, 0]], axis=1)
  nouns = names.themes[:, None] * (1 + words.NUM_ITEMS) + 1 + items
  return nouns * words.NUM_PLACES + places


def quantities(
  names: Names, kinds: np.ndarray, counted_by: np.ndarray
) -> np.ndarray:
  """Names of quantities; each one present has a distinct name.

  Args:
    names: to choose from.
    kinds: kinds of the nodes of all problems, then of further quantities, int
      [B, S]; names of ABSENT ones are arbitrary.
    counted_by: index of the total that counts each quantity, or -1, int [B, S].

  Returns:
    Token ids i32 [B, S, 4].
  """
  is_total, is_counted = kinds == TOTAL, counted_by >= 0
  on_grid = (kinds != ABSENT) & ~is_total & ~is_counted
  rank = np.maximum(np.cumsum(on_grid, axis=1) - 1, 0)
  items, places = (
    np.take_along_axis(part, rank, axis=1)
    for part in (names.items, names.places)
  )
  rank = np.maximum(np.cumsum(is_total, axis=1) - 1, 0)
  own = np.take_along_axis(names.total_places, rank, axis=1)
  of_total = np.take_along_axis(own, np.maximum(counted_by, 0), axis=1)
  node = np.arange(kinds.shape[1]) % MAX_NODES
  counted = names.counted_items[:, node]
  items = np.where(is_total, -1, np.where(is_counted, counted, items))
  places = np.where(is_total, own, np.where(is_counted, of_total, places))
  return language.quantities(names.themes, items, places)
