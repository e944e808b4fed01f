"""A cache of three stacks: before a loop, in it, and after it."""

from typing import NamedTuple

from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention.cache import Cache, SplitCache
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision

AnyCache = Cache | SplitCache


class PartsCache(NamedTuple):
  """Keys and values of the three parts; rows have the same tokens in each.

  Attributes:
    prelude, coda: a slot for every layer; there may be none.
    core: a slot for every layer in every loop, or as its kind shares them.
  """

  prelude: AnyCache
  core: AnyCache
  coda: AnyCache

  @property
  def capacity(self) -> int:
    """M, maximum number of tokens of a row."""
    return self.core.capacity

  def within(self, span: int | None) -> "PartsCache":
    """See `Cache.within`."""
    return PartsCache(*(part.within(span) for part in self))

  def cut(self, length: Array, rows: Array) -> "PartsCache":
    """See `Cache.cut`; for caches without a part for prompts."""
    parts = (part for part in self if isinstance(part, Cache))
    return PartsCache(*(part.cut(length, rows) for part in parts))

  def extended(self, places: Array) -> "PartsCache":
    """See `Cache.extended`."""
    return PartsCache(*(part.extended(places) for part in self))


def empty(
  shape: Shape,
  num_layers: tuple[int, int, int],
  batch: int,
  max_tokens: int,
  precision: Precision,
  *,
  num_loops: int,
  kind: str,
  prompt_tokens: int = 0,
) -> PartsCache:
  """A cache without tokens, see `CausalFamily.empty_cache`.

  Args:
    shape: structure of the blocks.
    num_layers: layers before the loop, in it, and after it.
    batch, max_tokens, num_loops, kind, prompt_tokens: as there.
    precision: dtypes of the model.
  """
  before, core, after = num_layers

  def part(slots: int, num_loops: int, kind: str) -> AnyCache:
    weight = cache_lib.loop_weights(kind, num_loops)
    of_all = slots * num_loops, None
    of_rest = (slots * (num_loops if weight is None else 1), weight)
    rooms = [(max_tokens - prompt_tokens, *of_rest)]
    if prompt_tokens:
      rooms = [(prompt_tokens, *of_all), *rooms]
    made = [
      cache_lib.empty(shape, count, batch, num_tokens, precision, weight)
      for num_tokens, count, weight in rooms
    ]
    return SplitCache(*made) if prompt_tokens else made[0]

  once = 1, "per_loop"
  return PartsCache(
    part(before, *once), part(core, num_loops, kind), part(after, *once)
  )
