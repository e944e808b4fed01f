"""The cache of prelude, core and coda."""

from typing import Any, NamedTuple

from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention.cache import Cache, SplitCache
from loopjax.types import PRECISIONS, Array

CACHES = cache_lib.KINDS
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

  def extended(self, places: Array) -> "PartsCache":
    """See `Cache.extended`."""
    return PartsCache(*(part.extended(places) for part in self))


def empty_cache(
  model: Any,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> PartsCache:
  """See `CausalFamily.empty_cache`; `kind` is one of `nn.cache.KINDS`."""
  config, kind = model.config, kind or "per_loop"
  num_loops = config.num_loops if num_loops is None else num_loops
  weight = cache_lib.loop_weights(kind, num_loops)

  def empty(slots: int, num_tokens: int, weight: Array | None = None) -> Cache:
    return cache_lib.empty(
      config.block_shape(), slots, batch, num_tokens,
      PRECISIONS[config.precision], weight,
    )  # fmt: skip

  def once(slots: int) -> AnyCache:
    if not prompt_tokens:
      return empty(slots, max_tokens)
    rest = max_tokens - prompt_tokens
    return SplitCache(empty(slots, prompt_tokens), empty(slots, rest))

  slots = config.num_layers
  all_slots = slots * (num_loops if weight is None else 1)
  core: AnyCache
  if prompt_tokens:
    core = SplitCache(
      empty(slots * num_loops, prompt_tokens),
      empty(all_slots, max_tokens - prompt_tokens, weight),
    )
  else:
    core = empty(all_slots, max_tokens, weight)
  return PartsCache(once(config.num_prelude), core, once(config.num_coda))
