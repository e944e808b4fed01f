"""Decoding, in lockstep or by depth.

In lockstep, a step is a token of every row, and ends when the last row has
exited. By depth, a step is one loop of every row: when a row exits, its token
is sampled and it starts the next one in the next step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.generate import sampling
from loopjax.generate.programs.cached_model import CachedModel, read_out
from loopjax.generate.programs.slots import (
  BY_DEPTH,
  EXITS,
  UNROLLED,
  Generated,
  Slots,
  State,
  generated,
  repeat,
  with_seen,
)
from loopjax.loop import driver
from loopjax.types import Array, Output


def decode(
  params: Any,
  state: State,
  active: Array,
  *,
  cached_model: CachedModel,
  num_steps: int,
  num_top: int,
  span: int | None,
  depth: str,
) -> tuple[State, Generated]:
  """Generates up to `num_steps` tokens in every active slot.

  Args:
    params: the model's parameters, from `CachedModel.for_decoding`.
    state: donated.
    active: bool [B]; the sequences in other slots wait.
    cached_model: the model without its parameters.
    num_steps: maximum number of tokens; fewer if all sequences end before.
    num_top: number of most likely tokens to report.
    span: number of cache entries that attention reads, at least as many as the
      longest sequence has tokens, new ones included; None for all.
    depth: one of `slots.DEPTHS`. With BY_DEPTH a step is one loop of each row:
      there are as many steps as `num_steps` tokens can take, and up to
      `max_tokens_by_depth(num_steps)` tokens of a row.

  Returns:
    The state, and the generated tokens [n, B] of n steps.
  """
  if depth not in (EXITS, BY_DEPTH):
    cached_model = cached_model._replace(exit_rule="fixed")
  model: Any = nnx.merge(cached_model.graphdef, params)

  def sample_and_store(
    output: Output, cache: Any, slots: Slots, live: Array
  ) -> Any:
    hidden, loops = output.hidden[:, 0], output.stats["loops_run"]
    slots, generated = sampled(model, hidden, slots, live, loops, num_top)
    return State(cache, slots), generated

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
    return sample_and_store(output, cache, slots, live)

  def one_loop(state: State) -> tuple[State, Generated]:
    cache, slots = state
    live = active & (slots.num_left > 0)
    output, cache, progress = cached_model.advance(
      model,
      slots.token[:, None],
      cache,
      slots.progress,
      valid=live[:, None],
      num_loops=slots.num_loops,
      exit_threshold=slots.exit_threshold,
      span=span,
    )
    slots = slots._replace(progress=progress)
    return sample_and_store(output, cache, slots, output.stats["loops_run"] > 0)

  if depth == BY_DEPTH:
    num_loops = num_steps * cached_model.num_loops
    return repeat(
      one_loop, state, active, num_loops, max_tokens_by_depth(num_steps)
    )
  state, generated = repeat(one_token, state, active, num_steps)
  # A token that was begun by depth has been read from its first loop on.
  progress = state.slots.progress
  nothing = jax.tree.map(jnp.zeros_like, progress)
  progress = driver.tree_where(active, nothing, progress)
  slots = state.slots._replace(progress=progress)
  return state._replace(slots=slots), generated


def max_tokens_by_depth(num_steps: int) -> int:
  """Maximum tokens of a row in a call by depth, if other rows run all loops."""
  return 2 * num_steps


def sampled(
  model: Any,
  hidden: Array,
  slots: Slots,
  live: Array,
  loops: Array,
  num_top: int,
) -> tuple[Slots, Generated]:
  """Samples the next token of the live rows.

  Args:
    model: the model with its parameters.
    hidden: the output layer's input, [B, D].
    slots: the rows.
    live: bool [B].
    loops: f32 [B], loops that the model ran.
    num_top: number of most likely tokens to report.
  """
  logits = read_out(model, hidden)
  token = sampling.draw(logits, slots.seen, slots.sampling, slots.position)
  is_stop = jnp.any(token[:, None] == slots.stops, axis=1)
  new = generated(
    logits,
    token,
    is_stop,
    slots.num_left <= 1,
    num_top,
    valid=live,
    loops=loops,
  )
  return slots._replace(
    token=jnp.where(live, token, slots.token),
    position=slots.position + live.astype(jnp.int32),
    num_left=jnp.where(
      live, jnp.where(is_stop, 0, slots.num_left - 1), slots.num_left
    ),
    seen=with_seen(slots.seen, token, live),
  ), new
