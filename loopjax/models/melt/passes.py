"""Loops over a row by chunks, or over a whole row as a looped model has them.

Section 3.3 of arXiv 2605.07721. Inside a chunk tokens see each other's rows of
the current loop, in earlier chunks those of the last. The layers of a looped
model, of which none keeps anything of the loop before, and all tokens in one
chunk are that model: so the teacher is run, too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.loop import chunks, driver
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt.layer import Layer, Rows
from loopjax.nn import remat as remat_lib
from loopjax.nn import rope
from loopjax.types import Array


class Stack(NamedTuple):
  """The parameters of a loop: stacked layers, and the norm that ends it."""

  layers: Layer
  final_norm: Any


class Plan(NamedTuple):
  """Static options of a pass.

  Attributes:
    gate: one of `config.GATES`.
    num_loops: K.
    rope_base: longest wavelength over 2 pi, in tokens.
    kind, remat: how loops run, see `LoopOptions`.
    keep: what to return of every loop: "hidden" and "attention".
    chunk_size: C, which divides the row; 0 for one chunk.
    reach, hops: how far gradients go back, as in `chunks.Options`.
    sweeps: of `chunks.sweeps`; 0 for chunk by chunk.
  """

  gate: str
  num_loops: int
  rope_base: float
  kind: str = "scan"
  remat: str = "none"
  keep: tuple[str, ...] = ()
  chunk_size: int = 0
  reach: int = -1
  hops: int = -1
  sweeps: int = 0


class _Constants(NamedTuple):
  """Of a chunk of C tokens; None for what there is not.

  Attributes:
    tables: rotary tables of its tokens, [C, d_h / 2].
    documents: of its tokens, i32 [B, C], and of the row, i32 [B, T].
    alpha: share of the latent in keys and values, f32 scalar.
    attention: what attention should give, [K, L, B, C, D].
  """

  tables: tuple[Array, Array]
  documents: tuple[Array, Array] | None
  alpha: Array | None
  attention: Array | None


def run(
  stack: Stack,
  plan: Plan,
  hidden: Array,
  *,
  documents: Array | None = None,
  alpha: Array | None = None,
  attention: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """All loops over rows of T tokens.

  Args:
    stack: the parameters.
    plan: what to run.
    hidden: embedded tokens [B, T, D].
    documents: i32 [B, T], a number for each document of a row; None for one.
    alpha: f32 scalar, of `layer.mixture`; None for 1. A constant.
    attention: a teacher's outputs of attention, [K, L, B, T, D]. A constant.

  Returns:
    The last loop's output [B, T, D], and of every loop: "hidden_norm" [K]; with
    `attention` "apart", the mean squared distance from it, f32 [K, L, B, T];
    and what `plan.keep` names, "hidden" [K, B, T, D] and "attention", the
    output of attention before any norm, [K, L, B, T, D].
  """
  num_tokens = hidden.shape[1]
  size = plan.chunk_size or num_tokens
  num_chunks, rest = divmod(num_tokens, size)
  assert rest == 0, (num_tokens, size)
  head_width = stack.layers.block.attention.head_width
  tables = rope.rope_tables(
    jnp.arange(num_tokens)[:, None], head_width, plan.rope_base
  )

  def by_chunk(x: Array | None, axis: int) -> Any:
    """[n, ...], with C in the place of T."""
    if x is None:
      return None
    shape = (*x.shape[:axis], num_chunks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def everywhere(x: Array | None) -> Any:
    return None if x is None else jnp.broadcast_to(x, (num_chunks, *x.shape))

  constants = _Constants(
    (by_chunk(tables[0], 0), by_chunk(tables[1], 0)),
    None
    if documents is None
    else (by_chunk(documents, 1), everywhere(documents)),
    everywhere(alpha),
    by_chunk(attention, 3),
  )
  step = functools.partial(_chunk, plan)
  if num_chunks == 1:
    first = jax.tree.map(lambda x: x[0], constants)
    (hidden, records), _ = step(stack, hidden, first, None, 0)
    return hidden, records

  options = chunks.Options(step, plan.reach, plan.hops)
  over = functools.partial(chunks.run, options)
  if plan.sweeps:
    over = functools.partial(chunks.sweeps, options, plan.sweeps)
  history = _history(stack, plan, hidden, alpha)
  (ends, records), _ = over(stack, by_chunk(hidden, 1), constants, history)

  def joined(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

  axes = {"hidden": 2, "attention": 3, "apart": 3}
  norms = jnp.mean(records.pop("hidden_norm"), axis=0)
  records = {name: joined(x, axes[name]) for name, x in records.items()}
  return joined(ends, 1), {"hidden_norm": norms, **records}


def _history(
  stack: Stack, plan: Plan, hidden: Array, alpha: Array | None
) -> Rows:
  """Buffers of keys and values, [1 or K, L, B, T, G, d_h].

  While rows depend on each loop's own input, every loop has rows of its own.
  """
  num_layers = len(stack.layers.block.attention.key.kernel[...])
  compute = stack.layers.block.attention.precision.compute
  rows = layer_lib.no_rows(stack.layers, hidden.astype(compute))
  loops = 1 if alpha is None else plan.num_loops
  return jax.tree.map(
    lambda x: jnp.zeros((loops, num_layers, *x.shape), x.dtype), rows
  )


def _chunk(
  plan: Plan,
  stack: Stack,
  hidden: Array,
  constants: _Constants,
  history: Rows | None,
  first: Array | int,
) -> tuple[tuple[Array, dict[str, Array]], Rows]:
  """All loops over a chunk; see `chunks.Options`.

  Args:
    hidden: [B, C, D].
    history: of which rows before `first` are seen; None if there are none.
  """
  alpha, (batch, size, _) = constants.alpha, hidden.shape
  tables = constants.tables
  cos, sin = (jnp.broadcast_to(x, (batch, *x.shape)) for x in tables)
  by_row = cos, sin
  own_seen, past_seen = _visible(constants.documents, size, history, first)
  x = hidden.astype(stack.layers.block.attention.precision.compute)
  no_rows = layer_lib.no_rows(stack.layers, x)
  start = jnp.zeros(batch, jnp.int32)

  def loop(carry: Any, index: Array) -> tuple[Any, dict[str, Array]]:
    hidden, latents, _ = carry
    past = jax.tree.map(lambda x: x[index if len(x) > 1 else 0], history)
    target = constants.attention
    target = None if target is None else target[index]

    def run_layer(hidden: Array, of_layer: Any) -> tuple[Array, Any]:
      layer, latent, past, target = of_layer
      x = layer_lib.inputs(layer, hidden)
      latent, own = layer_lib.update(
        layer, plan.gate, index, x, latent, by_row, no_rows, start
      )
      if alpha is not None:
        mixture = layer_lib.mixture(alpha, latent, x)
        own = layer_lib.project(layer, mixture, by_row)
      parts = [(*own, own_seen)]
      parts += [] if past is None else [(*past, past_seen)]
      mixed = layer_lib.attend(layer, x, tables, *parts)
      record = {"attention": mixed} if "attention" in plan.keep else {}
      if target is not None:
        wide = mixed.astype(jnp.float32)
        record["apart"] = jnp.mean((wide - target) ** 2, axis=-1)
      hidden = layer.block.add(sharding.by_example(hidden), mixed)
      return hidden, (latent, own if alpha is None else x, record)

    hidden, (latents, kept, record) = remat_lib.scan(
      run_layer,
      hidden,
      (stack.layers, latents, past, target),
      unroll=plan.kind == "unroll",
      remat=plan.remat,
    )
    hidden = stack.final_norm(hidden)
    norms = jnp.linalg.norm(hidden, axis=-1)
    record["hidden_norm"] = jnp.mean(norms)
    if "hidden" in plan.keep:
      record["hidden"] = hidden
    if alpha is not None:
      record["inputs"], kept = kept, None
    return (hidden, latents, kept), record

  num_layers = len(stack.layers.block.attention.key.kernel[...])
  latents = jnp.zeros((num_layers, *x.shape), x.dtype)
  rows = jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape)), no_rows)
  rows = jax.tree.map(lambda x, like: x.astype(like.dtype), rows, no_rows)
  carry = (hidden, latents, rows if alpha is None else None)
  (hidden, latents, rows), records, _ = driver.run_loop(
    loop, carry, plan.num_loops, kind=plan.kind
  )
  if alpha is None:
    rows = jax.tree.map(lambda x: x[None], rows)
  else:
    mixtures = layer_lib.mixture(
      alpha, latents[None], records.pop("inputs")
    )  # Of the last loop's latent, which later chunks see.
    of_layers = jax.vmap(layer_lib.project, (0, 0, None))
    rows = jax.vmap(of_layers, (None, 0, None))(stack.layers, mixtures, by_row)
  return (hidden, records), rows


def _visible(
  documents: tuple[Array, Array] | None,
  size: int,
  history: Rows | None,
  first: Array | int,
) -> tuple[Array, Array | None]:
  """What a chunk's tokens see of each other, and of a row's history.

  bool [B or 1, C, C] and [B or 1, C, T].
  """
  own = jnp.tril(jnp.ones((1, size, size), bool))
  past = None
  if history is not None:
    num_rows = history[0].shape[-3]
    past = jnp.broadcast_to(jnp.arange(num_rows) < first, (1, size, num_rows))
  if documents is not None:
    here, everywhere = documents
    own &= here[:, :, None] == here[:, None, :]
    if past is not None:
      past &= here[:, :, None] == everywhere[:, None, :]
  return own, past
