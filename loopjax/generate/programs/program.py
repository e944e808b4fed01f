"""The programs of the engine: reading prompts, and generating tokens.

Buffers are donated and updated in place.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.generate.programs import decoding
from loopjax.generate.programs import slots as slots_lib
from loopjax.generate.programs.cached_model import CachedModel
from loopjax.generate.programs.decoding import sampled
from loopjax.generate.programs.slots import (
  UNROLLED,
  Generated,
  PromptChunks,
  State,
)
from loopjax.types import Array


class Programs(NamedTuple):
  """The compiled programs; all donate the state.

  Attributes:
    prefill: (params, state, chunks, has_top, span=) -> (state, generated).
    decode: (params, state, rows, has_top, span=, depth=) -> (state,
      generated), see `in_rows`.
  """

  prefill: Any
  decode: Any


def of_params(
  cached_model: CachedModel, params: Any, num_steps: int
) -> tuple[Programs, Any]:
  """The programs of a model, and the parameters of those that write.

  Args:
    cached_model: the model without its parameters.
    params: the parameters, which `prefill` takes.
    num_steps: see `decoding.decode`.
  """
  decoding_model, of_writers = cached_model.for_decoding(params)
  axes = cached_model.batch_axes(params)
  return _programs(cached_model, decoding_model, axes, num_steps), of_writers


@functools.lru_cache(maxsize=8)
def _programs(
  model: CachedModel, decoding_model: CachedModel, axes: Any, num_steps: int
) -> Programs:
  """The programs of a model, which its engines share.

  They are compiled when they are first called. `decode` takes the parameters of
  `CachedModel.for_decoding`, which made `decoding_model`.
  """
  read = functools.partial(prefill, cached_model=model, axes=axes)
  write = functools.partial(
    in_rows, cached_model=decoding_model, num_steps=num_steps
  )
  return Programs(
    jax.jit(read, static_argnames="span", donate_argnames="state"),
    jax.jit(write, static_argnames=("span", "depth"), donate_argnames="state"),
  )


def prefill(
  params: Any,
  state: State,
  chunks: PromptChunks,
  has_top: Array,
  *,
  cached_model: CachedModel,
  axes: Any,
  span: int | None,
) -> tuple[State, Generated]:
  """Reads chunks of prompts, and generates a token after each last chunk.

  Args:
    params: the model's parameters.
    state: donated.
    chunks: P chunks, which are written to their prompts' slots.
    cached_model: the model without its parameters.
    has_top: bool scalar, whether to report the most likely tokens.
    axes: from `CachedModel.batch_axes`.
    span: number of cache entries that attention reads, at least as many as the
      longest of these sequences has tokens, chunk included; None for all.

  Returns:
    The state, and the generated tokens [P].
  """
  model: Any = nnx.merge(cached_model.graphdef, params)
  slot_ids, num_rows = chunks.slot_ids, len(chunks.slot_ids)
  empty = cached_model.empty_cache(params, num_rows, cached_model.max_tokens)
  cache = jax.tree.map(
    lambda axis, old, new: _gathered(axis, old, new, slot_ids, chunks.is_first),
    axes,
    state.cache,
    empty,
  )
  hidden, loops, cache = read_chunks(cached_model, model, chunks, cache, span)
  cache = jax.tree.map(
    lambda axis, old, new: _scattered(axis, old, new, slot_ids),
    axes,
    state.cache,
    cache,
  )
  seen = state.slots.seen.at[slot_ids].get(mode="clip")
  seen &= ~chunks.is_first[:, None]
  token = jnp.where(chunks.valid, chunks.tokens, seen.shape[1])
  each = jnp.arange(num_rows)
  seen = seen.at[each[:, None], token].set(True, mode="drop")
  slots, generated = sampled(
    model,
    hidden,
    chunks.slots._replace(seen=seen),
    chunks.is_last,
    loops,
    has_top,
  )
  slots = jax.tree.map(
    lambda old, new: _scattered(0, old, new, slot_ids), state.slots, slots
  )
  return State(cache, slots), generated


def in_rows(
  params: Any,
  state: State,
  rows: Array,
  has_top: Array,
  *,
  cached_model: CachedModel,
  num_steps: int,
  span: int | None,
  depth: str,
) -> tuple[State, Generated]:
  """Generates tokens in some slots.

  Args:
    params: the model's parameters, from `CachedModel.for_decoding`.
    state: donated.
    rows: i32 [R], the slots; B, which is out of range, for none. If R is B,
      slot i is in place i, or waits.
    cached_model: the model without its parameters.
    has_top, num_steps, depth: see `decoding.decode`.
    span: number of cache entries that attention reads, at least as many as the
      longest sequence has tokens, new ones included; None for all.

  Returns:
    The state, and the generated tokens [n, R].
  """
  call = functools.partial(
    decoding.decode,
    cached_model=cached_model,
    num_steps=num_steps,
    depth=depth,
  )
  active = rows < len(state.slots.token)
  unstack = depth == UNROLLED
  if len(rows) == len(state.slots.token) and not unstack:
    return call(params, state, active, has_top, span=span)
  part = slots_lib.of_rows(state, rows, span, unstack)
  part, generated = call(params, part, active, has_top, span=None)
  return slots_lib.with_rows(state, part, rows, num_steps), generated


def _gathered(
  axis: int, old: Array, empty: Array, slot_ids: Array, is_first: Array
) -> Array:
  """The rows of a leaf of the cache; empty ones for first chunks."""
  if axis < 0:
    return old
  old = jnp.take(old, slot_ids, axis=axis, mode="clip")
  by_row = [1] * old.ndim
  by_row[axis] = len(slot_ids)
  return jnp.where(is_first.reshape(by_row), empty, old)


def _scattered(axis: int, old: Array, new: Array, slot_ids: Array) -> Array:
  """A leaf with new rows in their slots; a slot out of range is dropped."""
  if axis < 0:
    return new
  return old.at[(slice(None),) * axis + (slot_ids,)].set(new, mode="drop")


def read_chunks(
  cached_model: CachedModel,
  model: Any,
  chunks: PromptChunks,
  cache: Any,
  span: int | None,
) -> tuple[Array, Array, Any]:
  """Prefills the next tokens of P prompts, with all loops or with fewer.

  After prefill with m loops, the cache equals that of tokens that exited after
  loop m (`exits.ExitPolicy.kept`). The last token runs all loops, like a
  generated one, so no token is predicted with fewer.

  Args:
    cached_model: the model without its parameters.
    model: the model with them.
    chunks: the tokens.
    cache: the cache of the tokens before them.
    span: see `CachedModel.read`.

  Returns:
    (the output layer's input for each row's last token [P, D], the number of
    loops that it ran f32 [P], the cache).
  """
  tokens, valid, slots = chunks.tokens, chunks.valid, chunks.slots
  rows = jnp.arange(len(tokens))
  last = jnp.maximum(jnp.sum(valid, axis=1) - 1, 0)
  prefill_loops, reads_last = chunks.num_loops, None
  if (
    prefill_loops is not None
  ):  # In some rows the last token is read by itself.
    reads_last = chunks.is_last & (prefill_loops > 0)
    is_last = jnp.arange(tokens.shape[1])[None] == last[:, None]
    valid &= ~(reads_last[:, None] & is_last)
  output, cache = cached_model.read(
    model,
    tokens,
    cache,
    valid=valid,
    num_loops=slots.num_loops
    if prefill_loops is None
    else jnp.where(prefill_loops > 0, prefill_loops, slots.num_loops),
    exit_threshold=slots.exit_threshold,
    span=span,
    fills=prefill_loops is not None,
  )
  hidden, loops = output.hidden[rows, last], output.stats["loops_run"]
  if reads_last is None:
    return hidden, loops, cache
  output, cache = cached_model._replace(exit_rule="fixed").read(
    model,
    tokens[rows, last][:, None],
    cache,
    valid=reads_last[:, None],
    num_loops=slots.num_loops,
    exit_threshold=slots.exit_threshold,
    span=span,
  )
  return (
    jnp.where(reads_last[:, None], output.hidden[:, 0], hidden),
    jnp.where(reads_last, output.stats["loops_run"], loops),
    cache,
  )
