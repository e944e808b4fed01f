"""Reading in parts, for families that keep keys and values of every loop."""

from typing import Any

from loopjax.nn import cache as cache_lib
from loopjax.nn import stack
from loopjax.nn.cache import Cache, Prompted
from loopjax.types import PRECISIONS, Array, Output


def empty_cache(
  model: Any,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> Any:
  """Room for keys and values of every layer, in every loop or shared by all."""
  config, kind = model.config, kind or "per_loop"
  num_loops = config.num_loops if num_loops is None else num_loops

  def room(kind: str, num_tokens: int) -> Cache:
    weight = cache_lib.weights(kind, num_loops)
    return cache_lib.empty(
      config.block_shape(),
      config.num_layers * (num_loops if weight is None else 1),
      batch,
      num_tokens,
      PRECISIONS[config.precision],
      weight,
    )

  if not prompt_tokens:
    return room(kind, max_tokens)
  assert kind != "per_loop" and prompt_tokens < max_tokens, kind
  return Prompted(
    room("per_loop", prompt_tokens), room(kind, max_tokens - prompt_tokens)
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


def apart(model: Any) -> Any:
  """The model for a loop of steps of one token, see `stack.apart`."""
  model.layers = stack.apart(model.layers)
  return model
