"""DiscoLoop's decode and embed: the mean token vector under softmax(U h).

It runs by chunks of the vocabulary (`vocabulary.add_logits`), with its own
backward pass: Phi(h) = sum_v p_v E[v] needs no [..., V] array. The backward
pass keeps h, Phi(h) and the sums, and recomputes the logits. With l = U h / tau
and the cotangent g of Phi,

  dL/dl_v = p_v (<g, E[v]> - <g, Phi>)
  dL/dh = sum_v dL/dl_v U[v] / tau
  dL/dU[v] = sum_h dL/dl_v h / tau,  dL/dE[v] = sum_h p_v g.

With `top_k` the chunks select the k likeliest tokens, and the same sums run
over these tokens; ties are broken arbitrarily.

On a CPU core, for value and gradient over 1,024 tokens of width 128, chunks
took 0.74 of the time and 0.64 of the memory of the plain form for a vocabulary
of 1,050 tokens, 0.85 and 0.10 for 32,768; with top_k = 128, 0.44 and 0.08, and
0.41 and 0.11 (python benchmarks/bench_decode_embed.py --part=operator). The
plain form was not faster at any size tried.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.kernels import vocabulary
from loopjax.kernels.vocabulary import product
from loopjax.types import Array

_ROWS_AT_ONCE = 8  # Vectors per token gathered in one step.


class Options(NamedTuple):
  """Static options.

  Attributes:
    temperature: tau.
    top_k: 0 for all tokens.
    num_tokens: number of real tokens, which come first in the vocabulary.
    num_chunks: n.
  """

  temperature: float
  top_k: int
  num_tokens: int
  num_chunks: int


def decode_embed(
  hidden: Array,
  table: Array,
  head: Array | None = None,
  *,
  temperature: float = 1.0,
  top_k: int = 0,
  num_padding_tokens: int = 0,
  chunk_size: int = vocabulary.CHUNK_SIZE,
) -> Array:
  """Phi(h) = sum_v p_v E[v] with p = softmax(U h / temperature).

  DiscoLoop, equation 5 (arXiv 2607.00341); with `top_k` Phi_k of appendix B.
  Products do not convert their inputs and accumulate in float32; the softmax is
  in float32. Supports reverse mode only.

  Args:
    hidden: h [..., D].
    table: E [V, D], the vectors to average.
    head: U [V, D], the decoding matrix; E itself if None (tied).
    temperature: tau > 0; the logits are divided by it.
    top_k: p is restricted to the k most likely tokens and renormalised;
      0 for the whole vocabulary.
    num_padding_tokens: the last ids of the vocabulary get no probability.
    chunk_size: no array is larger than [..., chunk_size] or the table.

  Returns:
    [..., D] in float32, or float64 for float64 inputs.
  """
  options = Options(
    temperature,
    top_k,
    len(table) - num_padding_tokens,
    vocabulary.num_chunks(len(table), chunk_size),
  )
  tables = (table,) if head is None else (table, head)
  if not top_k:
    return _embed_all(hidden, tables, options)

  def decode_few(hidden, tables):
    constants = jax.lax.stop_gradient((hidden, tables[-1]))
    ids, best = _select(*constants, options)  # Differentiated in _embed_few.
    return _embed_few(hidden, tables, ids, best, options)

  # Otherwise the compiler would gather tables and reduce their gradients in
  # every step of the loops over tokens.
  return sharding.by_example(decode_few, len(hidden))(hidden, tables)


def _logits(
  hidden: Array, head: Array, chunk: Array, options: Options
) -> Array:
  """Logits [..., C] of a chunk of a folded table; -inf for padding tokens."""
  logits, ids = vocabulary.logits(hidden, head, chunk)
  logits /= options.temperature
  return jnp.where(ids < options.num_tokens, logits, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embed_all(
  hidden: Array, tables: tuple[Array, ...], options: Options
) -> Array:
  """Phi over the whole vocabulary; tables are (E,) or (E, U)."""
  return _embed_all_forward(hidden, tables, options)[0]


def _embed_all_forward(hidden, tables, options):
  table = tables[0]
  folded = [vocabulary.fold(x, options.num_chunks) for x in tables]
  wide = jnp.promote_types(jnp.float32, hidden.dtype)

  def step(chunk, carry):
    top, total, mean = carry
    logits = _logits(hidden, folded[-1], chunk, options)
    rows = vocabulary.rows(folded[0], chunk)
    top, total, weights, fade = vocabulary.add_logits(top, total, logits)
    added = product("...v,vd->...d", weights.astype(table.dtype), rows)
    return top, total, mean * fade[..., None] + added

  tokens = hidden.shape[:-1]
  start = (
    jnp.full(tokens, -jnp.inf, wide),
    jnp.zeros(tokens, wide),
    jnp.zeros((*tokens, table.shape[1]), wide),
  )
  top, total, mean = jax.lax.fori_loop(0, options.num_chunks, step, start)
  mean = mean / total[..., None]
  return mean, (hidden, tables, mean, top, total)


def _embed_all_backward(options, residuals, cotangent):
  hidden, tables, mean, top, total = residuals
  folded = [vocabulary.fold(x, options.num_chunks) for x in tables]
  shift = jnp.sum(cotangent * mean, axis=-1, keepdims=True)
  narrow = cotangent.astype(tables[0].dtype)

  def step(chunk, carry):
    d_hidden, d_folded = carry
    logits = _logits(hidden, folded[-1], chunk, options)
    rows = [vocabulary.rows(x, chunk) for x in folded]
    # Not exp(logits - log sum exp): a large sum would round the difference.
    weights = jnp.exp(logits - top[..., None]) / total[..., None]
    along = product("...d,vd->...v", narrow, rows[0])
    d_logits = weights * (along - shift) / options.temperature
    d_logits = d_logits.astype(hidden.dtype)
    d_hidden += product("...v,vd->...d", d_logits, rows[-1])
    d_rows = _by_role(
      product("...v,...d->vd", weights.astype(narrow.dtype), narrow),
      product("...v,...d->vd", d_logits, hidden),
      tables,
    )
    return d_hidden, [
      vocabulary.put_rows(whole, part, chunk)
      for whole, part in zip(d_folded, d_rows, strict=True)
    ]

  zeros = [jnp.zeros_like(x) for x in folded]
  start = jnp.zeros(hidden.shape, mean.dtype), zeros
  d_hidden, d_folded = jax.lax.fori_loop(0, options.num_chunks, step, start)
  d_tables = tuple(vocabulary.unfold(x, len(tables[0])) for x in d_folded)
  return d_hidden.astype(hidden.dtype), d_tables


_embed_all.defvjp(_embed_all_forward, _embed_all_backward)


def _select(
  hidden: Array, head: Array, options: Options
) -> tuple[Array, Array]:
  """The k likeliest tokens [..., k], likeliest first, and their logits."""
  k = options.top_k
  folded = vocabulary.fold(head, options.num_chunks)

  def step(chunk, carry):
    ids, best = carry
    logits = _logits(hidden, folded, chunk, options)
    both = jnp.concatenate([best, logits], axis=-1)
    best, place = jax.lax.top_k(both, k)
    kept = jnp.take_along_axis(ids, jnp.minimum(place, k - 1), axis=-1)
    fresh = (place - k) * options.num_chunks + chunk
    return jnp.where(place < k, kept, fresh), best

  shape = (*hidden.shape[:-1], k)
  wide = jnp.promote_types(jnp.float32, hidden.dtype)
  start = jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, wide)
  return jax.lax.fori_loop(0, options.num_chunks, step, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _embed_few(
  hidden: Array,
  tables: tuple[Array, ...],
  ids: Array,
  best: Array,
  options: Options,
) -> Array:
  """Phi over the selected tokens; `best` are their logits."""
  return _embed_few_forward(hidden, tables, ids, best, options)[0]


def _embed_few_forward(hidden, tables, ids, best, options):
  del options
  table = tables[0]
  weights = jax.nn.softmax(best, axis=-1)

  def step(mean, part):
    ids, weights = part
    return mean + product(
      "...k,...kd->...d", weights.astype(table.dtype), table[ids]
    ), None

  zero = jnp.zeros((*hidden.shape[:-1], table.shape[1]), best.dtype)
  mean, _ = jax.lax.scan(step, zero, (_slices(ids), _slices(weights)))
  return mean, (hidden, tables, ids, weights, mean)


def _embed_few_backward(options, residuals, cotangent):
  hidden, tables, ids, weights, mean = residuals
  table, head = tables[0], tables[-1]
  shift = jnp.sum(cotangent * mean, axis=-1, keepdims=True)
  narrow = cotangent.astype(table.dtype)

  def step(carry, part):
    d_hidden, d_tables = carry
    ids, weights = part
    rows = [x[ids] for x in tables]
    along = product("...d,...kd->...k", narrow, rows[0])
    d_logits = weights * (along - shift) / options.temperature
    d_hidden += product(
      "...k,...kd->...d", d_logits.astype(head.dtype), rows[-1]
    )
    d_rows = _by_role(
      weights[..., None] * cotangent[..., None, :],
      d_logits[..., None] * hidden[..., None, :].astype(d_logits.dtype),
      tables,
    )
    return (
      d_hidden,
      tuple(
        whole.at[ids].add(part)
        for whole, part in zip(d_tables, d_rows, strict=True)
      ),
    ), None

  # Many tokens contribute to a row, which needs the wide dtype.
  wide = tuple(jnp.zeros(x.shape, mean.dtype) for x in tables)
  start = jnp.zeros(hidden.shape, mean.dtype), wide
  parts = _slices(ids), _slices(weights)
  (d_hidden, d_tables), _ = jax.lax.scan(step, start, parts)
  d_tables = jax.tree.map(lambda d, x: d.astype(x.dtype), d_tables, tables)
  return d_hidden.astype(hidden.dtype), d_tables, None, None


_embed_few.defvjp(_embed_few_forward, _embed_few_backward)


def _slices(x: Array) -> Array:
  """[..., k] -> [k / b, ..., b] for steps that gather b vectors per token."""
  k = x.shape[-1]
  size = next(b for b in range(_ROWS_AT_ONCE, 0, -1) if k % b == 0)
  return jnp.moveaxis(x.reshape(*x.shape[:-1], k // size, size), -2, 0)


def _by_role(d_table, d_head, tables):
  """Gradients of (E, U), or their sum if both are one table."""
  return (d_table, d_head) if len(tables) == 2 else (d_table + d_head,)
