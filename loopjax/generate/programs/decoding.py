"""Decoding: a step is a token of every row.

It ends when the last row has exited its loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.generate import sampling
from loopjax.generate.programs.cached_model import CachedModel, read_out
from loopjax.generate.programs.slots import (
  EXITS,
  LENGTH,
  MAX_TOP,
  STOP,
  UNFINISHED,
  UNROLLED,
  Generated,
  Slots,
  State,
  repeat,
)
from loopjax.types import Array


def decode(
  params: Any,
  state: State,
  active: Array,
  has_top: Array,
  *,
  cached_model: CachedModel,
  num_steps: int,
  span: int | None,
  depth: str,
) -> tuple[State, Generated]:
  """Generates up to `num_steps` tokens in every active slot.

  Args:
    params: the model's parameters, from `CachedModel.for_decoding`.
    state: donated.
    active: bool [B]; the sequences in other slots wait.
    cached_model: the model without its parameters.
    has_top: bool scalar, whether to report the most likely tokens.
    num_steps: maximum number of tokens; fewer if all sequences end before.
    span: number of cache entries that attention reads, at least as many as the
      longest sequence has tokens, new ones included; None for all.
    depth: one of `slots.DEPTHS`.

  Returns:
    The state, and the generated tokens [num_steps, B].
  """
  if depth != EXITS:
    cached_model = cached_model._replace(exit_rule="fixed")
  model: Any = nnx.merge(cached_model.graphdef, params)

  def one_token(state: State) -> tuple[State, Generated]:
    cache, slots = state
    live = active & (slots.num_left > 0)
    output, cache = cached_model.read(
      model,
      slots.token[:, None],
      cache,
      valid=live[:, None],
      num_loops=None if depth == UNROLLED else slots.num_loops,
      exit_threshold=slots.exit_threshold,
      span=span,
    )
    hidden, loops = output.hidden[:, 0], output.stats["loops_run"]
    slots, generated = sampled(model, hidden, slots, live, loops, has_top)
    return State(cache, slots), generated

  return repeat(one_token, state, active, num_steps)


def sampled(
  model: Any,
  hidden: Array,
  slots: Slots,
  live: Array,
  loops: Array,
  has_top: Array,
) -> tuple[Slots, Generated]:
  """Samples the next token of the live rows.

  Args:
    model: the model with its parameters.
    hidden: the output layer's input, [B, D].
    slots: the rows.
    live: bool [B].
    loops: f32 [B], loops that the model ran.
    has_top: bool scalar, whether to report the most likely tokens.
  """
  num_top = min(MAX_TOP, model.spec.num_tokens)
  logits = read_out(model, hidden)
  token = sampling.draw(logits, slots.seen, slots.sampling, slots.position)
  is_stop = jnp.any(token[:, None] == slots.stops, axis=1)
  total = jax.nn.logsumexp(logits, axis=-1)
  chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
  best, top_tokens = jax.lax.cond(
    has_top,
    lambda: tuple(jax.lax.top_k(logits, num_top)),
    lambda: (
      jnp.zeros((len(token), num_top), logits.dtype),
      jnp.zeros((len(token), num_top), jnp.int32),
    ),
  )
  is_last = slots.num_left <= 1
  new = Generated(
    valid=live,
    token=token,
    log_probability=chosen - total,
    top_tokens=top_tokens,
    top_log_probabilities=best - total[:, None],
    loops=loops,
    finish=jnp.where(is_stop, STOP, jnp.where(is_last, LENGTH, UNFINISHED)),
  )
  added = jnp.where(live, token, slots.seen.shape[1])
  return slots._replace(
    token=jnp.where(live, token, slots.token),
    position=slots.position + live.astype(jnp.int32),
    num_left=jnp.where(
      live, jnp.where(is_stop, 0, slots.num_left - 1), slots.num_left
    ),
    seen=slots.seen.at[jnp.arange(len(added)), added].set(True, mode="drop"),
  ), new
