"""Reading token by token, with sleep whenever the window is full.

Computes what `sleep.Model` computes of a whole sequence, while the sequence
arrives (arXiv 2605.26099, algorithm 1): between two sleeps a token costs one
pass, and memory does not grow with the number of tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.models.sleep.model import Kept, Model
from loopjax.types import Array


class Reading(NamedTuple):
  """State of the reader.

  Attributes:
    slept: state after the last sleep.
    awake: the same including the tokens since then, L - 1 of them visible.
    tokens: tokens since the last sleep, i32 [B, L]; entries after them are
      arbitrary.
    num_tokens: how many they are, i32 scalar, less than L.
  """

  slept: Kept
  awake: Kept
  tokens: Array
  num_tokens: Array


def start(model: Model, batch: int) -> Reading:
  """The state before the first token of `batch` sequences."""
  config = model.config
  slept = model.empty_state(
    batch,
    num_past=model.num_past,
    carry_convolutions=config.carry_convolutions,
  )
  tokens = jnp.zeros((batch, config.window), jnp.int32)
  return Reading(slept, _awake(model, slept), tokens, jnp.asarray(0))


def read(
  model: Model,
  reading: Reading,
  token: Array,
  *,
  num_passes: int | None = None,
) -> tuple[Array, Reading]:
  """Reads one token per sequence in one pass; sleeps once the window is full.

  Args:
    model: any `sleep.Model`.
    reading: from `start`, or from the previous token.
    token: ids [B]. Padding occupies a place in the window, and is never read.
    num_passes: N of a sleep; the model's own if None.

  Returns:
    Logits of the next token [B, V], and the state after this one.
  """
  length = model.config.window
  num_passes = model.config.num_passes if num_passes is None else num_passes
  hidden, awake = model.awake(
    reading.awake, model.embed(token[:, None]), length - 1
  )
  tokens = jax.lax.dynamic_update_slice_in_dim(
    reading.tokens, token[:, None], reading.num_tokens, axis=1
  )

  def fall_asleep() -> tuple[Kept, Kept]:
    slept, _ = model.sleep(
      reading.slept, model.embed(tokens), num_passes, model.options.kind
    )
    return slept, _awake(model, slept)

  num_tokens = reading.num_tokens + 1
  slept, awake = jax.lax.cond(
    num_tokens == length, fall_asleep, lambda: (reading.slept, awake)
  )
  logits = model.logits(hidden)[:, 0]
  return logits, Reading(slept, awake, tokens, num_tokens % length)


def _awake(model: Model, slept: Kept) -> Kept:
  """The state after a sleep, with room for the tokens to come.

  Within a window convolutions continue and attention sees all tokens, even if
  neither is kept across a sleep.
  """
  empty = model.empty_state(
    len(slept.seen), num_past=model.config.window - 1, carry_convolutions=True
  )
  parts = []
  for old, new in zip(slept.parts, empty.parts, strict=True):
    state = old.state
    if state.tail is None:
      state = state._replace(tail=new.state.tail)
    past = old.past if model.num_past else new.past
    parts.append(new._replace(state=state, past=past))
  seen = slept.seen if model.num_past else empty.seen
  return Kept(tuple(parts), seen)
