"""Reading in parts, for families that keep keys and values of every loop."""

from typing import Any

from loopjax.nn import cache as cache_lib
from loopjax.nn.cache import Cache
from loopjax.types import PRECISIONS, Array, Output


def empty_cache(
  model: Any,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> Cache:
  """Room for keys and values of every layer, in every loop or shared by all."""
  config = model.config
  num_loops = config.num_loops if num_loops is None else num_loops
  weight = cache_lib.weights(kind or "per_loop", num_loops)
  return cache_lib.empty(
    config.block_shape(),
    config.num_layers * (num_loops if weight is None else 1),
    batch,
    max_tokens,
    PRECISIONS[config.precision],
    weight,
  )


def read(
  model: Any,
  tokens: Array,
  cache: Cache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
) -> tuple[Output, Cache]:
  """Reads on after what is in a cache.

  No loop is left out, even if all tokens have halted: later ones attend to what
  every loop leaves.
  """
  output = model(
    tokens, num_loops=num_loops, kind="scan", cache=cache, valid=valid
  )
  return output._replace(cache=None), output.cache
