"""Reading in parts: one row of a cache for a token and layer, in all loops.

A part is read in chunks of `Config.prefill_chunk` tokens, inside which tokens
see each other's rows of the current loop, while those before are final. So what
is read depends on where chunks end, unless they have one token: with one, any
parts give what the full forward pass gives; with more, parts that are whole
numbers of chunks do.

A token that leaves the loop early skips the rest for good: its row stays what
its last loop has made of it, and that is what later tokens see, whatever loop
they are in.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.models import exiting
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt.model import Model
from loopjax.nn import remat as remat_lib
from loopjax.nn import rope
from loopjax.types import PRECISIONS, Array, Output


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "length"),
  meta_fields=("span",),
)
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of the layers, one after another along a row.

  Attributes:
    key, value: [B, L R, G, d_h]; layer l has rows l R to l R + R - 1, of which
      those before the length hold tokens; what lies in the others is
      arbitrary. R is the most tokens and a chunk, which ends in tokens that are
      not there. Keys are rotated.
    length: i32 [B], tokens of each row.
    span: rows of a layer that attention looks at; R if None.
  """

  key: Array
  value: Array
  length: Array
  span: int | None = None

  def within(self, span: int | None) -> "Cache":
    """As in `nn.cache.Cache`."""
    return dataclasses.replace(self, span=span)


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> Cache:
  """Room for keys and values of every layer, whatever the number of loops."""
  del num_loops, kind, prompt_tokens
  config, shape = model.config, model.config.block_shape()
  rows = config.num_layers * (max_tokens + config.read_chunk(model.spec))
  heads = (shape.num_key_value_heads, shape.head_width)
  compute = PRECISIONS[config.precision].compute
  none = jnp.zeros((batch, rows, *heads), compute)
  return Cache(none, none, jnp.zeros(batch, jnp.int32))


def read(
  model: Model,
  tokens: Array,
  cache: Cache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
) -> tuple[Output, Cache]:
  """Reads on after what is in a cache; chunks begin with the first token.

  Rows exit_policy the loop as `exit_policy` says, or none does. Those of several tokens are
  parts of prompts, which run all the loops that they may.
  """
  config = model.config
  chunk = config.read_chunk(model.spec)
  most = cache.key.shape[1] // config.num_layers - chunk
  num_tokens = tokens.shape[1]
  if num_tokens > most:
    raise UserError(f"{num_tokens} tokens do not fit into a cache of {most}")
  if valid is None:
    valid = jnp.ones(tokens.shape, bool)
  # Tokens that are there first: chunks are of the text, not of its padding.
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

  def step(cache: Cache, part: Any) -> tuple[Cache, tuple[Array, Array]]:
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


def _read_chunk(
  model: Model,
  tokens: Array,
  valid: Array,
  cache: Cache,
  num_loops: int | None,
  exit_policy: exits.ExitPolicy | None,
  rule: str,
) -> tuple[Cache, tuple[Array, Array]]:
  """The cache after a chunk [B, C], the output of its rows' last loops, and how
  many these are, i32 [B].

  Tokens that are not there come after those that are.
  """
  num_loops = model.plan(num_loops).num_loops
  count = jnp.sum(valid, axis=1, dtype=jnp.int32)
  there, one_loop = count > 0, loop_over(model, tokens.shape[1], cache)

  def loop(
    hidden: Array, kept: Any, index: Array, live: Array
  ) -> tuple[Array, Any]:
    return one_loop(hidden, kept, index, there & live)[:2]

  def all_live(carry: Any, index: Array) -> tuple[Any, None]:
    hidden, kept = carry
    return loop(hidden, kept, index, there), None

  hidden = model.token_embedding(tokens)
  latents = no_latents(model, tokens.shape)
  carry = hidden, (latents, (cache.key, cache.value))
  if exit_policy is None:
    (hidden, kept), _, _ = driver.run_loop(all_live, carry, num_loops)
    loops = jnp.full(len(tokens), num_loops, jnp.int32)
  else:
    hidden, kept, loops = exiting.run(
      model, exit_policy, rule, loop, carry, there, num_loops
    )
  cache = Cache(*kept[1], cache.length + count, cache.span)
  return cache, (hidden, loops)


def no_latents(model: Model, shape: tuple[int, ...]) -> Array:
  """Room for the latents of all layers before the first loop, [L, B, S, D]."""
  config = model.config
  compute = PRECISIONS[config.precision].compute
  return jnp.zeros((config.num_layers, *shape, config.width), compute)


def loop_over(
  model: Model, size: int, cache: Cache
) -> Callable[[Array, Any, Array, Array], tuple[Array, Any, Array]]:
  """A loop over the next C tokens after those in a cache.

  Args:
    model: that reads.
    size: C.
    cache: whose places count; its rows come with every call.

  Returns:
    (hidden [B, C, D]; latents [L, B, C, D] and rows; loop, from 0; live, bool
    [B]) -> hidden, latents and rows after it, and what the layers read, x in
    [L, B, C, D]. Rows that are not live are not written.
  """
  config, gate = model.config, model.config.gate
  num_layers = config.num_layers
  room = cache.key.shape[1] // num_layers
  fits = cache.length + size <= room
  places = cache.length[:, None] + jnp.arange(size)[None]
  span = min(cache.span or room, room)
  seen = jnp.arange(span)[None, None] <= places[..., None]
  head_width = config.block_shape().head_width
  tables = rope.rope_tables(places[..., None], head_width, config.rope_base)
  stack = model.stack()

  def loop(
    hidden: Array, kept: Any, index: Array, live: Array
  ) -> tuple[Array, Any, Array]:
    latents, rows = kept
    writes = fits & live

    def run_layer(carry: Any, of_layer: Any) -> tuple[Any, Any]:
      hidden, rows = carry
      layer, number, latent = of_layer
      x = layer_lib.inputs(layer, hidden)
      start = jnp.where(writes, number * room + cache.length, -1)
      latent, rows = layer_lib.update(
        layer, gate, index, x, latent, tables, rows, start
      )
      key, value = (
        jax.lax.dynamic_slice_in_dim(x, number * room, span, axis=1)
        for x in rows
      )
      mixed = layer_lib.attend(layer, x, tables, (key, value, seen))
      return (layer.block.add(hidden, mixed), rows), (latent, x)

    of_layers = stack.layers, jnp.arange(num_layers), latents
    (hidden, rows), (latents, inputs) = remat_lib.scan(
      run_layer, (hidden, rows), of_layers
    )
    return stack.final_norm(hidden), (latents, rows), inputs

  return loop
