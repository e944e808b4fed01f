"""The cache of a model that sleeps: the current window and the fast weights."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.models.sleep.model import Model
from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.types import PRECISIONS, Array

CACHES = ("fast_weights",)
States = tuple[fast_weights.State, ...]


class SleepCache(NamedTuple):
  """The state of rows, each of which has its own current window.

  Attributes:
    recent: keys and values of P past tokens and of the current window so far;
      a slot is an attention layer.
    mask: bool [B, P + L], False for padding among these.
    fill: i32 [B], number of tokens in the current window, less than L.
    start_states: states of the memory layers of prelude, core and coda at the
      start of the window; convolutions that are not carried are zeros.
    states: the same after the tokens read so far.
    core_inputs: f32 [B, L, D], the input of the core for the window's tokens.
    hidden: f32 [B, L, D], the output of the core's first pass for them.
  """

  recent: cache_lib.Cache
  mask: Array
  fill: Array
  start_states: States
  states: States
  core_inputs: Array
  hidden: Array


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> SleepCache:
  """See `CausalFamily.empty_cache`; the size is that of a window."""
  del max_tokens, num_loops, kind, prompt_tokens
  config, precision = model.config, PRECISIONS[model.config.precision]
  room = config.num_past + config.window
  states = model.empty_state(batch, num_past=0, carry_convolutions=True)
  start_states = tuple(part.state for part in states.parts)
  tokens = (batch, config.window, config.width)
  return SleepCache(
    recent=cache_lib.empty(
      config.block_shape(), config.num_layers, batch, room, precision
    ),
    mask=jnp.zeros((batch, room), bool),
    fill=jnp.zeros(batch, jnp.int32),
    start_states=start_states,
    states=start_states,
    core_inputs=jnp.zeros(tokens, precision.accumulate),
    hidden=jnp.zeros(tokens, precision.accumulate),
  )
