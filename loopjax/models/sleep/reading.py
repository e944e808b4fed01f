"""Incremental reading, with sleep whenever a window is full.

Computes the same as `model.Model` on the whole sequence (arXiv 2605.26099,
algorithm 1). Each token is read in one pass when it arrives, which is the first
pass over its window; when the window is full, the other N - 1 passes follow.
The size of the cache does not depend on the number of tokens; with a sliding
window it holds 2 L - 1 of them, where the paper holds L.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax import checks
from loopjax.models.sleep.model import Model
from loopjax.nn import attention, hybrid, rope
from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.types import PRECISIONS, Array, Output

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
    core_outputs: f32 [B, L, D], the core's outputs in its first pass.
  """

  recent: cache_lib.Cache
  mask: Array
  fill: Array
  start_states: States
  states: States
  core_inputs: Array
  core_outputs: Array


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> SleepCache:
  """See `Reading.empty_cache`; it is as large as a window."""
  del max_tokens, num_loops, kind
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
    core_outputs=jnp.zeros(tokens, precision.accumulate),
  )


def read(
  model: Model,
  tokens: Array,
  cache: SleepCache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
) -> tuple[Output, SleepCache]:
  """See `Reading.read`; a row sleeps when its window is full.

  A padding id takes up a place in its window, as in `Model`, but is masked; a
  token that is not valid takes up no place.
  """
  num_passes = checks.num_loops(model.config, num_loops)
  length, (batch, size) = model.config.window, tokens.shape
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  counts = jnp.sum(valid, axis=1, dtype=jnp.int32)
  packing = fast_weights.packing(valid)  # Moves valid tokens to the front.
  tokens = jnp.take_along_axis(tokens, packing.order, axis=1)
  rows = jnp.arange(batch)[:, None]
  offsets = jnp.arange(min(size, length))[None]

  def read_on(_: Array, carry: tuple) -> tuple:
    """Reads each row up to the end of its window, or of its tokens."""
    cache, done, hidden = carry
    num = jnp.minimum(counts - done, length - cache.fill)
    present, indices = offsets < num[:, None], done[:, None] + offsets
    next_tokens = jnp.take_along_axis(
      tokens, jnp.minimum(indices, size - 1), axis=1
    )
    new, cache = _awake(model, next_tokens, present, cache)
    indices = jnp.where(present, indices, size)
    hidden = hidden.at[rows, indices].set(new, mode="drop")
    cache = jax.lax.cond(
      jnp.any(cache.fill == length),
      lambda cache: _sleep(model, cache, num_passes),
      lambda cache: cache,
      cache,
    )
    return cache, done + jnp.minimum(num, offsets.shape[1]), hidden

  carry = (
    cache,
    jnp.zeros(batch, jnp.int32),
    jnp.zeros((batch, size, model.config.width), cache.core_outputs.dtype),
  )
  # The current window may be nearly full, so read to its end first.
  carry = read_on(jnp.asarray(0), carry)
  if size > 1:
    num_more = -(-(size - 1) // length)
    carry = jax.lax.fori_loop(0, num_more, read_on, carry)
  cache, _, hidden = carry
  hidden = fast_weights.unpack(hidden, packing)
  output = Output(
    logits=model.logits(hidden),
    losses={},
    stats={"loops_run": jnp.full(batch, num_passes, jnp.float32)},
    loops={},
    trace={},
    hidden=model.readout_input(hidden),
  )
  return output, cache


def _awake(
  model: Model, tokens: Array, present: Array, cache: SleepCache
) -> tuple[Array, SleepCache]:
  """One pass over tokens that fit into the current windows.

  Args:
    model: the model.
    tokens: token ids [B, S].
    present: bool [B, S], True for the first tokens of each row only.
    cache: before the tokens.

  Returns:
    (the residual stream [B, S, D], the cache after the tokens).
  """
  hidden, token_mask = model.embed(tokens)
  token_mask = present if token_mask is None else token_mask & present
  places = cache.recent.places(present)
  mask = _put(cache.mask, places, token_mask)
  metadata = _metadata(model, places, mask)
  packing = fast_weights.packing(token_mask)
  recent, states, outputs = cache.recent, [], []
  parts = zip(model.parts(), cache.states, _slots(model), strict=True)
  for part, state, slot in parts:
    hidden, recent, state = hybrid.read_groups(
      part, hidden, recent, state, metadata, packing, first_slot=slot
    )
    outputs.append(hidden)
    states.append(state)
  start = (cache.recent.length - cache.fill)[:, None]
  in_window = jnp.where(present, places - start, model.config.window)
  return hidden, cache._replace(
    recent=recent.extended(places),
    mask=mask,
    fill=cache.fill + jnp.sum(present, axis=1, dtype=jnp.int32),
    states=tuple(states),
    core_inputs=_put(cache.core_inputs, in_window, outputs[0]),
    core_outputs=_put(cache.core_outputs, in_window, outputs[1]),
  )


def _sleep(model: Model, cache: SleepCache, num_passes: int) -> SleepCache:
  """Passes 2 to N over the windows that are full, and their eviction."""
  config, full = model.config, cache.fill == model.config.window
  (_, core, coda), (_, slot, last_slot) = model.parts(), _slots(model)
  start = cache.recent.length - cache.fill
  places = start[:, None] + jnp.arange(config.window)[None]
  packing = fast_weights.packing(
    jnp.take_along_axis(cache.mask, places, axis=1)
  )
  out_of_range = cache.mask.shape[1]  # Rows that do not sleep write nothing.
  places = jnp.where(full[:, None], places, out_of_range)
  metadata = _metadata(model, places, cache.mask)

  def one_pass(n: Array, carry: tuple) -> tuple:
    hidden, recent, state = carry
    hidden, state = model.next_input(
      n, hidden, state, cache.core_inputs, cache.start_states[1]
    )
    return hybrid.read_groups(
      core, hidden, recent, state, metadata, packing, first_slot=slot
    )

  recent, (first, state, last) = cache.recent, cache.states
  if num_passes > 1:
    carry = cache.core_outputs, recent, state
    carry = jax.lax.fori_loop(1, num_passes, one_pass, carry)
    hidden, recent, state = carry
    _, recent, last = hybrid.read_groups(
      coda,
      hidden,
      recent,
      cache.start_states[2],
      metadata,
      packing,
      first_slot=last_slot,
    )
  states: States = (first, state, last)
  if not config.carry_convolutions:
    states = tuple(
      x._replace(tail=jax.tree.map(jnp.zeros_like, x.tail)) for x in states
    )

  def where_full(new: Array, old: Array) -> Array:
    """`new` [groups, layers, B, ...] in rows that sleep, `old` in others."""
    return jnp.where(full.reshape(-1, *[1] * (new.ndim - 3)), new, old)

  recent, mask = _evict(model, recent, cache.mask, start, full)
  return cache._replace(
    recent=recent,
    mask=mask,
    fill=jnp.where(full, 0, cache.fill),
    start_states=jax.tree.map(where_full, states, cache.start_states),
    states=jax.tree.map(where_full, states, cache.states),
  )


def _evict(
  model: Model, recent: cache_lib.Cache, mask: Array, start: Array, full: Array
) -> tuple[cache_lib.Cache, Array]:
  """Evicts full windows, except for their last P tokens.

  A full window is at places start to start + L - 1 of `recent`. The P tokens
  that are kept move to places 0 to P - 1.
  """
  num_past, config = model.config.num_past, model.config
  length = jnp.where(full, num_past, recent.length)
  if not num_past:
    return dataclasses.replace(recent, length=length), mask
  shift = (start + config.window - num_past)[:, None]
  kept_places = shift + jnp.arange(num_past)[None]
  # Keys are rotated from their old positions to their new ones.
  offset = jnp.broadcast_to(-shift[..., None], (*kept_places.shape, 1))
  head_width = config.block_shape().head_width
  tables = rope.rope_tables(offset, head_width, config.rope_base)

  def take(x: Array) -> Array:
    return jnp.take_along_axis(x, kept_places[None, :, None, :, None], axis=3)

  def put(old: Array, new: Array) -> Array:
    values = jnp.where(
      full[None, :, None, None, None],
      new.astype(old.dtype),
      old[:, :, :, :num_past],
    )
    return old.at[:, :, :, :num_past].set(values)

  # vmap over slots and heads: the tables are indexed by row and place.
  rotate = jax.vmap(jax.vmap(rope.rotate, (0, None)), (2, None), 2)
  rotated = rotate(take(recent.key)[..., None, :], tables)[..., 0, :]
  past_mask = jnp.take_along_axis(mask, kept_places, axis=1)
  past_mask = jnp.where(full[:, None], past_mask, mask[:, :num_past])
  recent = dataclasses.replace(
    recent,
    key=put(recent.key, rotated),
    value=put(recent.value, take(recent.value)),
    length=length,
  )
  return recent, mask.at[:, :num_past].set(past_mask)


def _metadata(model: Model, places: Array, mask: Array) -> attention.Metadata:
  """Metadata of tokens at places [B, S], which attend to the last L tokens.

  A token itself is one of the L; `mask`: bool [B, P + L], False for padding.
  """
  config = model.config
  tables = rope.rope_tables(
    places[..., None], config.block_shape().head_width, config.rope_base
  )
  distance = places[..., None] - jnp.arange(mask.shape[1])[None, None]
  in_window = (distance >= 0) & (distance < config.window)
  return attention.Metadata(tables, in_window & mask[:, None], places)


def _slots(model: Model) -> tuple[int, int, int]:
  """The cache slots of the first layers of prelude, core and coda."""
  config = model.config
  return (0, config.num_prelude, config.num_layers - config.num_coda)


def _put(x: Array, places: Array, values: Array) -> Array:
  """x [B, N, ...] with values [B, S, ...] at the places that are below N."""
  rows = jnp.arange(len(x))[:, None]
  return x.at[rows, places].set(values, mode="drop")
