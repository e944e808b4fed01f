"""All loops over sequences of tokens, chunk by chunk.

Section 3.3 of arXiv 2605.07721. Tokens attend to the keys and values of their
own chunk in the current loop, and to those of earlier chunks after the last
loop. With one chunk and the gate "last" this is a looped model, so that the
teacher is run by the same code.

A model that decodes reads chunks of one token: what it learned from keys and
values of the current loop is lost to it. `Options.sweeps` (ours) trains on what
decoding sees, without reading token by token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.loop import chunks, driver
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt.layer import KeyValues, Layer
from loopjax.nn import remat as remat_lib
from loopjax.nn import rope
from loopjax.types import Array


class Stack(NamedTuple):
  """The parameters of a loop: stacked layers, and the norm after them."""

  layers: Layer
  final_norm: Any


class Options(NamedTuple):
  """Static options of a pass.

  Attributes:
    gate: one of `config.GATES`.
    num_loops: K.
    rope_base: longest wavelength over 2 pi, in tokens.
    kind, remat: how loops are executed, see `LoopOptions`.
    keep: records to return for every loop: "hidden" and "attention".
    chunk_size: C, which divides T; 0 for one chunk.
    reach, hops: truncation of gradients, as in `chunks.Options`.
    sweeps: how many times all tokens are read again at once, each as a chunk of
      its own, with the history of the pass before (Jacobi's iteration). After s
      sweeps the first s + 1 tokens equal those of chunks of one token. The
      results are those of the last sweep.
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
  """Inputs of a chunk of C tokens that have no gradient.

  Attributes:
    tables: rotary tables of its tokens, [C, d_h / 2].
    documents: document numbers of its tokens, i32 [B, C], and of the whole row,
      i32 [B, T]; None if a row is one document.
    alpha: weight of the latent in keys and values, f32 scalar; None for 1.
    attention: targets of the attention outputs, [K, L, B, C, D], or None.
  """

  tables: tuple[Array, Array]
  documents: tuple[Array, Array] | None
  alpha: Array | None
  attention: Array | None


def run(
  stack: Stack,
  options: Options,
  hidden: Array,
  *,
  documents: Array | None = None,
  alpha: Array | None = None,
  attention: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Runs all loops over rows of T tokens.

  Args:
    stack: the parameters.
    options: static options.
    hidden: embedded tokens [B, T, D].
    documents: i32 [B, T], a number for each document of a row; None if a row is
      one document.
    alpha: f32 scalar, see `layer.interpolate`; None for 1. Has no gradient.
    attention: a teacher's attention outputs, [K, L, B, T, D], or None. Has no
      gradient.

  Returns:
    (the last loop's output [B, T, D], records by name). The records are
    "hidden_norm" [K]; if `attention` is given, "squared_distance", the mean
    over features of the squared distance from it, f32 [K, L, B, T]; and those
    that `options.keep` names: "hidden" [K, B, T, D], and "attention", the
    output of attention before any norm, [K, L, B, T, D].
  """
  num_tokens = hidden.shape[1]
  size = options.chunk_size or num_tokens
  num_chunks, rest = divmod(num_tokens, size)
  assert rest == 0, (num_tokens, size)
  head_width = stack.layers.block.attention.head_width
  tables = rope.rope_tables(
    jnp.arange(num_tokens)[:, None], head_width, options.rope_base
  )

  pair = None if documents is None else (documents, documents)
  whole = hidden, _Constants(tables, pair, alpha, attention)
  step = functools.partial(_chunk, options)
  if num_chunks == 1:
    (ends, records), history = step(stack, *whole, None, 0)
  else:
    (ends, records), history = _by_chunk(stack, options, num_chunks, *whole)
  for _ in range(options.sweeps):
    (ends, records), history = step(stack, *whole, history, None)
  return ends, records


def _by_chunk(
  stack: Stack,
  options: Options,
  num_chunks: int,
  hidden: Array,
  constants: _Constants,
) -> tuple[tuple[Array, dict[str, Array]], KeyValues]:
  """Runs all loops over one chunk after another; results as of `_chunk`."""

  def split(x: Array | None, axis: int) -> Any:
    """Splits an axis of T tokens: [..., T, ...] to [n, ..., C, ...]."""
    if x is None:
      return None
    shape = (*x.shape[:axis], num_chunks, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def repeat(x: Array | None) -> Any:
    return None if x is None else jnp.broadcast_to(x, (num_chunks, *x.shape))

  tables, documents, alpha, attention = constants
  by_chunk = _Constants(
    (split(tables[0], 0), split(tables[1], 0)),
    documents and (split(documents[0], 1), repeat(documents[1])),
    repeat(alpha),
    split(attention, 3),
  )
  (ends, records), history = chunks.run(
    chunks.Options(
      functools.partial(_chunk, options), options.reach, options.hops
    ),
    stack,
    split(hidden, 1),
    by_chunk,
    _history(stack, options, hidden, alpha),
  )

  def joined(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

  axes = {"hidden": 2, "attention": 3, "squared_distance": 3}
  norms = jnp.mean(records.pop("hidden_norm"), axis=0)
  records = {name: joined(x, axes[name]) for name, x in records.items()}
  return (joined(ends, 1), {"hidden_norm": norms, **records}), history


def _history(
  stack: Stack, options: Options, hidden: Array, alpha: Array | None
) -> KeyValues:
  """Empty buffers for the keys and values of all chunks.

  [1, L, B, T, G, d_h] each, or [K, ...] if there is an `alpha`: then keys and
  values also depend on the loop's own input and are not shared by loops.
  """
  num_layers = stack.layers.block.attention.key.kernel[...].shape[0]
  compute = stack.layers.block.attention.precision.compute
  empty = layer_lib.empty_key_values(stack.layers, hidden.astype(compute))
  loops = 1 if alpha is None else options.num_loops
  return jax.tree.map(
    lambda x: jnp.zeros((loops, num_layers, *x.shape), x.dtype), empty
  )


def _chunk(
  options: Options,
  stack: Stack,
  hidden: Array,
  constants: _Constants,
  history: KeyValues | None,
  first: Array | int | None,
) -> tuple[tuple[Array, dict[str, Array]], KeyValues]:
  """Runs all loops over a chunk; the step function of `chunks.Options`.

  Args:
    options: static options.
    stack: the parameters.
    hidden: embedded tokens [B, C, D].
    constants: the chunk's other inputs.
    history: keys and values of the row; None if there is one chunk.
    first: index of the chunk's first token; the history is masked from there.
      None if the chunk is the row, whose tokens are read as chunks of one.

  Returns:
    ((output [B, C, D], records), keys and values of the chunk for the history).
  """
  alpha, batch = constants.alpha, len(hidden)
  tables = constants.tables
  cos, sin = (jnp.broadcast_to(x, (batch, *x.shape)) for x in tables)
  x = hidden.astype(stack.layers.block.attention.precision.compute)
  empty = layer_lib.empty_key_values(stack.layers, x)
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
        layer, options.gate, index, x, latent, (cos, sin), empty, start
      )
      if alpha is not None:
        mixture = layer_lib.interpolate(alpha, latent, x)
        own = layer_lib.project(layer, mixture, (cos, sin))
      parts = layer_lib.visible_parts(own, past, constants.documents, first)
      mixed = layer_lib.attend(layer, x, tables, *parts)
      record = {"attention": mixed} if "attention" in options.keep else {}
      if target is not None:
        error = mixed.astype(jnp.float32) - target
        record["squared_distance"] = jnp.mean(error**2, axis=-1)
      hidden = layer.block.add(sharding.split_by_example(hidden), mixed)
      return hidden, (latent, own if alpha is None else x, record)

    hidden, (latents, own, record) = remat_lib.scan(
      run_layer,
      hidden,
      (stack.layers, latents, past, target),
      unroll=options.kind == "unroll",
      remat=options.remat,
    )
    hidden = stack.final_norm(hidden)
    record["hidden_norm"] = jnp.mean(jnp.linalg.norm(hidden, axis=-1))
    if "hidden" in options.keep:
      record["hidden"] = hidden
    if alpha is not None:
      record["inputs"], own = own, None
    return (hidden, latents, own), record

  num_layers = stack.layers.block.attention.key.kernel[...].shape[0]
  latents = jnp.zeros((num_layers, *x.shape), x.dtype)
  stacked = jax.tree.map(
    lambda x: jnp.zeros((num_layers, *x.shape), x.dtype), empty
  )
  carry = (hidden, latents, stacked if alpha is None else None)
  (hidden, latents, key_values), records, _ = driver.run_loop(
    loop, carry, options.num_loops, kind=options.kind
  )
  if alpha is None:
    key_values = jax.tree.map(lambda x: x[None], key_values)
  else:
    # Later chunks attend to projections of the last loop's latent.
    inputs = records.pop("inputs")
    mixtures = layer_lib.interpolate(alpha, latents[None], inputs)
    of_layers = jax.vmap(layer_lib.project, (0, 0, None))
    of_loops = jax.vmap(of_layers, (None, 0, None))
    key_values = of_loops(stack.layers, mixtures, (cos, sin))
  return (hidden, records), key_values
