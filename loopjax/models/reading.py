"""Prefill and decode, for families with one cache slot per layer and loop."""

from typing import Any

from loopjax import checks
from loopjax.nn import stack
from loopjax.nn.attention import cache as cache_lib
from loopjax.protocols import Reading
from loopjax.types import PRECISIONS, Array, Output


def empty_cache(
  model: Any,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> Any:
  """See `Reading.empty_cache`."""
  config, kind = model.config, kind or "per_loop"
  num_loops = checks.num_loops(config, num_loops)
  weight = cache_lib.loop_weights(kind, num_loops)
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
  cache: Any,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
) -> tuple[Output, Any]:
  """See `Reading.read`.

  All loops run, even if all tokens have halted: later tokens attend to the keys
  and values of every loop.
  """
  kind = "unroll" if cache.is_unstacked else "scan"
  output = model(
    tokens, num_loops=num_loops, kind=kind, cache=cache, valid=valid
  )
  return output._replace(cache=None), output.cache


def unstacked(model: Any) -> Any:
  """See `Reading.unstacked` and `nn.stack.unstacked`."""
  for name in ("prelude", "layers", "coda"):
    if hasattr(model, name):
      setattr(model, name, stack.unstacked(getattr(model, name)))
  return model


READING = Reading(
  caches=cache_lib.KINDS,
  empty_cache=empty_cache,
  read=read,
  has_span=True,
  has_places=True,
  unstacked=unstacked,
)
