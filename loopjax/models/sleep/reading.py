"""Reading in parts, with sleep whenever a window is full.

Computes what `sleep.Model` computes of a whole sequence, while the sequence
arrives (arXiv 2605.26099, algorithm 1). Between two sleeps a token costs one
pass, and memory does not grow with the number of tokens. That pass is the first
of the sleep: falling asleep takes the other N - 1.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.models.sleep.model import Model
from loopjax.nn import attention, fast_weights, hybrid, rope
from loopjax.nn import cache as cache_lib
from loopjax.types import PRECISIONS, Array, Output

States = tuple[fast_weights.State, ...]
CACHES = ("fast_weights",)


class Cache(NamedTuple):
  """What is kept of rows that fill their windows each by itself.

  Attributes:
    recent: keys and values of the window so far, after those of P tokens before
      it that stay visible; a slot is an attention layer.
    known: bool [B, P + L], which of these are not padding.
    fill: i32 [B], tokens of the window so far, less than L.
    asleep: of the memory layers of prelude, core and coda, when the window
      began; convolutions that are not carried on are zeros.
    awake: of the same now.
    entering: f32 [B, L, D], what the window's tokens are to the core.
    hidden: f32 [B, L, D], what one pass of the core made of them.
  """

  recent: cache_lib.Cache
  known: Array
  fill: Array
  asleep: States
  awake: States
  entering: Array
  hidden: Array


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> Cache:
  """Room for a window, however many tokens there will be."""
  del max_tokens, num_loops, kind, prompt_tokens
  config, precision = model.config, PRECISIONS[model.config.precision]
  room = model.num_past + config.window
  states = model.empty_state(batch, num_past=0, carry_convolutions=True)
  asleep = tuple(part.state for part in states.parts)
  tokens = (batch, config.window, config.width)
  return Cache(
    recent=cache_lib.empty(
      config.block_shape(), config.num_layers, batch, room, precision
    ),
    known=jnp.zeros((batch, room), bool),
    fill=jnp.zeros(batch, jnp.int32),
    asleep=asleep,
    awake=asleep,
    entering=jnp.zeros(tokens, precision.accumulate),
    hidden=jnp.zeros(tokens, precision.accumulate),
  )


def read(
  model: Model,
  tokens: Array,
  cache: Cache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
) -> tuple[Output, Cache]:
  """Reads tokens window by window; a row sleeps once its window is full.

  A padding id occupies a place in its window, as in `Model`, and is never read;
  a token that is not valid has no place.
  """
  num_passes = model.config.num_passes if num_loops is None else num_loops
  length, (batch, size) = model.config.window, tokens.shape
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  counts = jnp.sum(valid, axis=1, dtype=jnp.int32)
  packing = fast_weights.packing(valid)  # Valid ones first.
  tokens = jnp.take_along_axis(tokens, packing.order, axis=1)
  rows, part = jnp.arange(batch)[:, None], jnp.arange(min(size, length))[None]

  def read_on(_: Array, carry: tuple) -> tuple:
    """Each row to the end of its window, or of its tokens."""
    cache, done, hidden = carry
    num = jnp.minimum(counts - done, length - cache.fill)
    there, at = part < num[:, None], done[:, None] + part
    now = jnp.take_along_axis(tokens, jnp.minimum(at, size - 1), axis=1)
    read, cache = _awake(model, now, there, cache)
    hidden = hidden.at[rows, jnp.where(there, at, size)].set(read, mode="drop")
    cache = jax.lax.cond(
      jnp.any(cache.fill == length),
      lambda cache: _fall_asleep(model, cache, num_passes),
      lambda cache: cache,
      cache,
    )
    return cache, done + jnp.minimum(num, part.shape[1]), hidden

  carry = (
    cache,
    jnp.zeros(batch, jnp.int32),
    jnp.zeros((batch, size, model.config.width), cache.hidden.dtype),
  )
  # The first window may be nearly full.
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
    hidden=model.final_norm(hidden),
  )
  return output, cache


def _awake(
  model: Model, tokens: Array, there: Array, cache: Cache
) -> tuple[Array, Cache]:
  """One pass over the next tokens: the residual stream [B, S, D].

  there: bool [B, S], the first tokens of each row, as many as have room.
  """
  hidden, mask = model.embed(tokens)
  mask = there if mask is None else mask & there
  places = cache.recent.places(there)
  known = _put(cache.known, places, mask)
  metadata = _metadata(model, places, known)
  packing = fast_weights.packing(mask)
  recent, states, made = cache.recent, [], []
  parts = zip(model.parts(), cache.awake, _slots(model), strict=True)
  for part, state, slot in parts:
    hidden, recent, state = hybrid.read_groups(
      part, hidden, recent, state, metadata, packing, first_slot=slot
    )
    made.append(hidden)
    states.append(state)
  start = (cache.recent.length - cache.fill)[:, None]
  in_window = jnp.where(there, places - start, model.config.window)
  return hidden, cache._replace(
    recent=recent.extended(places),
    known=known,
    fill=cache.fill + jnp.sum(there, axis=1, dtype=jnp.int32),
    awake=tuple(states),
    entering=_put(cache.entering, in_window, made[0]),
    hidden=_put(cache.hidden, in_window, made[1]),
  )


def _fall_asleep(model: Model, cache: Cache, num_passes: int) -> Cache:
  """Passes 2 to N of the rows whose window is full, and its eviction."""
  config, full = model.config, cache.fill == model.config.window
  (_, core, coda), (_, slot, last_slot) = model.parts(), _slots(model)
  start = cache.recent.length - cache.fill
  places = start[:, None] + jnp.arange(config.window)[None]
  packing = fast_weights.packing(
    jnp.take_along_axis(cache.known, places, axis=1)
  )
  nowhere = cache.known.shape[1]  # Other rows write nothing.
  places = jnp.where(full[:, None], places, nowhere)
  metadata = _metadata(model, places, cache.known)
  old = cache.asleep[1]

  def one_pass(n: Array, carry: tuple) -> tuple:
    hidden, recent, state = carry
    fast = state.fast if config.carry_state else old.fast
    hidden = model.between(hidden, cache.entering, n)
    before = old._replace(fast=fast)
    return hybrid.read_groups(
      core, hidden, recent, before, metadata, packing, first_slot=slot
    )

  recent, (first, state, last) = cache.recent, cache.awake
  if num_passes > 1:
    carry = cache.hidden, recent, state
    carry = jax.lax.fori_loop(1, num_passes, one_pass, carry)
    hidden, recent, state = carry
    _, recent, last = hybrid.read_groups(
      coda,
      hidden,
      recent,
      cache.asleep[2],
      metadata,
      packing,
      first_slot=last_slot,
    )
  states: States = (first, state, last)
  if not config.carry_convolutions:
    states = tuple(
      x._replace(tail=jax.tree.map(jnp.zeros_like, x.tail)) for x in states
    )

  def of_full(new: Array, old: Array) -> Array:
    """new, [groups, layers, B, ...], in the rows that sleep."""
    return jnp.where(full.reshape(-1, *[1] * (new.ndim - 3)), new, old)

  recent, known = _evict(model, recent, cache.known, start, full)
  return cache._replace(
    recent=recent,
    known=known,
    fill=jnp.where(full, 0, cache.fill),
    asleep=jax.tree.map(of_full, states, cache.asleep),
    awake=jax.tree.map(of_full, states, cache.awake),
  )


def _evict(
  model: Model,
  recent: cache_lib.Cache,
  known: Array,
  start: Array,
  full: Array,
) -> tuple[cache_lib.Cache, Array]:
  """Drops full windows [start, start + L) but for their last P tokens."""
  num_past, config = model.num_past, model.config
  length = jnp.where(full, num_past, recent.length)
  if not num_past:
    return dataclasses.replace(recent, length=length), known
  shift = (start + config.window - num_past)[:, None]
  moved = shift + jnp.arange(num_past)[None]
  # Keys are rotated from their old places to their new ones.
  back = jnp.broadcast_to(-shift[..., None], (*moved.shape, 1))
  head_width = config.block_shape().head_width
  tables = rope.rope_tables(back, head_width, config.rope_base)

  def kept(x: Array) -> Array:
    return jnp.take_along_axis(x, moved[None, :, None, :, None], axis=3)

  def put(old: Array, new: Array) -> Array:
    here = jnp.where(
      full[None, :, None, None, None],
      new.astype(old.dtype),
      old[:, :, :, :num_past],
    )
    return old.at[:, :, :, :num_past].set(here)

  # Heads in the place of slots: tables are of rows and places.
  rotate = jax.vmap(jax.vmap(rope.rotate, (0, None)), (2, None), 2)
  rotated = rotate(kept(recent.key)[..., None, :], tables)[..., 0, :]
  seen = jnp.take_along_axis(known, moved, axis=1)
  seen = jnp.where(full[:, None], seen, known[:, :num_past])
  recent = dataclasses.replace(
    recent,
    key=put(recent.key, rotated),
    value=put(recent.value, kept(recent.value)),
    length=length,
  )
  return recent, known.at[:, :num_past].set(seen)


def _metadata(model: Model, places: Array, known: Array) -> attention.Metadata:
  """What tokens at places [B, S] see: L tokens, themselves included."""
  config = model.config
  tables = rope.rope_tables(
    places[..., None], config.block_shape().head_width, config.rope_base
  )
  distance = places[..., None] - jnp.arange(known.shape[1])[None, None]
  near = (distance >= 0) & (distance < config.window)
  return attention.Metadata(tables, near & known[:, None], places)


def _slots(model: Model) -> tuple[int, int, int]:
  """The first layers of prelude, core and coda."""
  config = model.config
  return (
    0,
    config.num_prelude_layers,
    config.num_layers - config.num_coda_layers,
  )


def _put(x: Array, places: Array, new: Array) -> Array:
  """x [B, N, ...] with new entries [B, S, ...] at places below N."""
  rows = jnp.arange(len(x))[:, None]
  return x.at[rows, places].set(new, mode="drop")
