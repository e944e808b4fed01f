"""Incremental reading: one cache entry per token and layer, for all loops.

Tokens are read in chunks of `Config.prefill_chunk`. Within a chunk tokens
attend to the keys and values of the current loop; those of earlier chunks are
final. Results therefore depend on the chunk boundaries: they equal those of the
full forward pass if every call of `read` but the last has a multiple of the
chunk size, and always if the chunk size is 1.

A token that exits early skips the remaining loops for good: its entry keeps the
keys and values of its last loop, and later tokens attend to these in all loops.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.models import by_depth, exiting
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt.model import Model
from loopjax.nn import remat as remat_lib
from loopjax.nn import rope
from loopjax.nn.attention.part import Part
from loopjax.types import PRECISIONS, Array, Output


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "length"),
  meta_fields=("span",),
)
@dataclasses.dataclass(frozen=True)
class LatentCache:
  """Keys and values of all layers, concatenated along one axis.

  Attributes:
    key, value: [B, L R, G, d_h]. Entries l R to l R + R - 1 belong to layer l;
      the first `length` of these hold tokens, the others arbitrary values. R is
      the maximum number of tokens plus one chunk, because padding at the end of
      a chunk is written too. Keys are rotated.
    length: i32 [B], number of tokens in each row of the batch.
    span: number of entries of each layer that attention reads; R if None.
  """

  key: Array
  value: Array
  length: Array
  span: int | None = None

  def within(self, span: int | None) -> "LatentCache":
    """As in `nn.attention.cache.Cache`."""
    return dataclasses.replace(self, span=span)


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> LatentCache:
  """See `CausalFamily.empty_cache`; independent of the number of loops."""
  del num_loops, kind, prompt_tokens
  config, shape = model.config, model.config.block_shape()
  entries = config.num_layers * (max_tokens + config.read_chunk(model.spec))
  heads = (shape.num_key_value_heads, shape.head_width)
  compute = PRECISIONS[config.precision].compute
  empty = jnp.zeros((batch, entries, *heads), compute)
  return LatentCache(empty, empty, jnp.zeros(batch, jnp.int32))


def read(
  model: Model,
  tokens: Array,
  cache: LatentCache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
) -> tuple[Output, LatentCache]:
  """`CausalFamily.read` with early exits; without them if there is no policy.

  The first chunk begins with the first token that is not padding. If rows have
  several tokens, which are parts of prompts, they run up to
  `exit_policy.num_loops` loops without an early exit.
  """
  config = model.config
  chunk = config.read_chunk(model.spec)
  max_tokens = cache.key.shape[1] // config.num_layers - chunk
  num_tokens = tokens.shape[1]
  if num_tokens > max_tokens:
    raise UserError(
      f"{num_tokens} tokens do not fit into a cache of {max_tokens}"
    )
  if valid is None:
    valid = jnp.ones(tokens.shape, bool)
  # Valid tokens first, so that chunks do not depend on padding.
  order = jnp.argsort(~valid, axis=1, stable=True)
  tokens, valid = (
    jnp.take_along_axis(x, order, axis=1) for x in (tokens, valid)
  )
  size = min(chunk, num_tokens)
  missing = ((0, 0), (0, -num_tokens % size))

  def by_chunk(x: Array) -> Array:
    x = jnp.pad(x, missing)
    return jnp.swapaxes(x.reshape(len(x), -1, size), 0, 1)

  rule = (
    exit_policy.rule if exit_policy is not None and num_tokens == 1 else "fixed"
  )

  def step(
    cache: LatentCache, part: Any
  ) -> tuple[LatentCache, tuple[Array, Array]]:
    tokens, valid = part
    return _read_chunk(
      model, tokens, valid, cache, num_loops, exit_policy, rule
    )

  parts = by_chunk(tokens), by_chunk(valid)
  if len(parts[0]) == 1:
    cache, found = step(cache, jax.tree.map(lambda x: x[0], parts))
    hidden, loops = found
  else:
    cache, (hidden, loops) = jax.lax.scan(step, cache, parts)
    loops = jnp.max(loops, axis=0)
    hidden = jnp.swapaxes(hidden, 0, 1)
    hidden = hidden.reshape(len(tokens), -1, config.width)
  back = jnp.argsort(order, axis=1)
  hidden = jnp.take_along_axis(hidden, back[..., None], axis=1)
  stats = {"loops_run": loops.astype(jnp.float32)}
  output = Output(model.logits(hidden), {}, stats, {}, {}, hidden)
  return output, cache


def between_tokens(model: Model, batch: int, rule: str) -> by_depth.Progress:
  """See `AdvancesRows`; rows keep the latents of their token."""
  latents = empty_latents(model, (batch, 1))
  progress = by_depth.between_tokens(model, batch, rule)
  return progress._replace(own=jnp.swapaxes(latents, 0, 1))


def advance(
  model: Model,
  tokens: Array,
  cache: LatentCache,
  progress: by_depth.Progress,
  *,
  num_loops: int,
  valid: Array,
  exit_policy: exits.ExitPolicy,
) -> tuple[Output, LatentCache, by_depth.Progress]:
  """See `AdvancesRows`; all loops of a row write to the same entry."""
  del num_loops  # A cache has one entry for any number.
  one_loop = make_loop(model, 1, cache)

  def step(hidden: Array, state: Any, k: Array, live: Array) -> Any:
    return one_loop(hidden, state, k[:, None, None], live)[:2]

  first = model.token_embedding(tokens)
  latents = jnp.swapaxes(progress.own, 0, 1)
  hidden, state, loops, progress = by_depth.run_one(
    model,
    exit_policy,
    step,
    (first, (latents, (cache.key, cache.value))),
    progress,
    valid[:, 0],
  )
  latents, (key, value) = state
  own = by_depth.by_row(valid, jnp.swapaxes(latents, 0, 1), progress.own)
  stats = {"loops_run": loops.astype(jnp.float32)}
  output = Output(model.logits(hidden), {}, stats, {}, {}, hidden)
  length = cache.length + (loops > 0)
  cache = LatentCache(key, value, length, cache.span)
  return output, cache, progress._replace(own=own)


def _read_chunk(
  model: Model,
  tokens: Array,
  valid: Array,
  cache: LatentCache,
  num_loops: int | None,
  exit_policy: exits.ExitPolicy | None,
  rule: str,
) -> tuple[LatentCache, tuple[Array, Array]]:
  """Reads a chunk of tokens [B, C] with padding at the end.

  Returns:
    The cache; (the output of each row's last loop [B, C, D], the number of
    loops of each row i32 [B]).
  """
  num_loops = model.pass_options(num_loops).num_loops
  count = jnp.sum(valid, axis=1, dtype=jnp.int32)
  reads, one_loop = count > 0, make_loop(model, tokens.shape[1], cache)

  def loop(
    hidden: Array, state: Any, index: Array, live: Array
  ) -> tuple[Array, Any]:
    return one_loop(hidden, state, index, reads & live)[:2]

  def all_live(carry: Any, index: Array) -> tuple[Any, None]:
    hidden, state = carry
    return loop(hidden, state, index, reads), None

  hidden = model.token_embedding(tokens)
  latents = empty_latents(model, tokens.shape)
  carry = hidden, (latents, (cache.key, cache.value))
  if exit_policy is None:
    (hidden, state), _, _ = driver.run_loop(all_live, carry, num_loops)
    loops = jnp.full(len(tokens), num_loops, jnp.int32)
  else:
    hidden, state, loops = exiting.run(
      model, exit_policy, rule, loop, carry, reads, num_loops
    )
  cache = LatentCache(*state[1], cache.length + count, cache.span)
  return cache, (hidden, loops)


def empty_latents(model: Model, shape: tuple[int, ...]) -> Array:
  """Latents of all layers before the first loop: zeros [L, B, S, D]."""
  config = model.config
  compute = PRECISIONS[config.precision].compute
  return jnp.zeros((config.num_layers, *shape, config.width), compute)


def make_loop(
  model: Model, size: int, cache: LatentCache
) -> Callable[[Array, Any, Array, Array], tuple[Array, Any, Array]]:
  """The function that runs one loop over C tokens that follow a cache.

  Args:
    model: the model.
    size: C.
    cache: gives the lengths and the span; its keys and values are arguments of
      the returned function.

  Returns:
    A function (hidden, state, index, live) -> (hidden, state, inputs), where
    hidden is [B, C, D]; state is (latents [L, B, C, D], (keys, values) as in
    `LatentCache`); index is the number of the loop, from 0, or of each row's,
    [B, 1, 1]; live, bool [B],
    marks the rows whose keys and values are written; inputs are x of all
    layers, [L, B, C, D].
  """
  config, gate = model.config, model.config.gate
  num_layers = config.num_layers
  capacity = cache.key.shape[1] // num_layers
  fits = cache.length + size <= capacity
  places = cache.length[:, None] + jnp.arange(size)[None]
  span = min(cache.span or capacity, capacity)
  visible = jnp.arange(span)[None, None] <= places[..., None]
  head_width = config.block_shape().head_width
  tables = rope.rope_tables(places[..., None], head_width, config.rope_base)
  stack = model.stack()

  def loop(
    hidden: Array, state: Any, index: Array, live: Array
  ) -> tuple[Array, Any, Array]:
    latents, buffers = state
    writes = fits & live

    def run_layer(carry: Any, of_layer: Any) -> tuple[Any, Any]:
      hidden, buffers = carry
      layer, number, latent = of_layer
      x = layer_lib.inputs(layer, hidden)
      start = jnp.where(writes, number * capacity + cache.length, -1)
      latent, buffers = layer_lib.update(
        layer, gate, index, x, latent, tables, buffers, start
      )
      key, value = (
        jax.lax.dynamic_slice_in_dim(x, number * capacity, span, axis=1)
        for x in buffers
      )
      part = Part(key, value, visible=visible)
      mixed = layer_lib.attend(layer, x, tables, part)
      return (layer.block.add(hidden, mixed), buffers), (latent, x)

    of_layers = stack.layers, jnp.arange(num_layers), latents
    (hidden, buffers), (latents, inputs) = remat_lib.scan(
      run_layer, (hidden, buffers), of_layers
    )
    return stack.final_norm(hidden), (latents, buffers), inputs

  return loop
