"""Reading token by token, with sleep whenever the window is full.

What `sleep.Model` computes of a whole sequence, as it is computed while the
sequence comes in (arXiv 2605.26099, algorithm 1): between two sleeps a token
costs one pass, and nothing grows with the number of tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.models.sleep.model import Kept, Model
from loopjax.types import Array


class Reading(NamedTuple):
  """Where the reading stands.

  Attributes:
    slept: what the last sleep left.
    awake: the same with the tokens since then, L - 1 of them in sight.
    tokens: those since then, i32 [B, L]; what is behind them has no meaning.
    num_tokens: how many they are, i32 scalar, less than L.
  """

  slept: Kept
  awake: Kept
  tokens: Array
  num_tokens: Array


def start(model: Model, batch: int) -> Reading:
  """Before the first token of `batch` sequences."""
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
  """Reads one token of every sequence in one pass; then sleeps, if it is time.

  Args:
    model: any `sleep.Model`.
    reading: from `start`, or from the token before.
    token: ids [B]. Padding counts as a token of the window, and as no other.
    num_passes: N of a sleep; the model's own if None.

  Returns:
    Logits of the next token [B, V], and the reading behind this one.
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
  """What a sleep left, with places for the tokens to come.

  Within a window convolutions carry on, and attention sees all of it, also
  where neither is kept over a sleep.
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
