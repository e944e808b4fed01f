"""`distill` by chunks of the vocabulary, with its own backward pass.

The first pass over the vocabulary finds both normalisers, by a running maximum
and sum (online softmax, arXiv 1805.02867), the second the divergence, since M
needs both. The backward pass keeps hidden states, normalisers and the
student's part R of the divergence, and recomputes the logits. With the
student's logits l (after the temperature) and a cotangent of 1,

  dL/dl_v = S_v - T_v                                  for beta = 0,
  dL/dl_v = (1 - beta) S_v log(S_v / M_v) - S_v R      for 0 < beta < 1,
    R = (1 - beta) KL(S || M),

and for beta = 1 the same with T in place of M and without the factor.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels import vocabulary
from loopjax.kernels.distill.reference import shares
from loopjax.kernels.vocabulary import product
from loopjax.types import Array

Readout = tuple[Array, Array]  # Hidden states [..., D], folded table [C, n, D].
Normaliser = tuple[Array, Array]  # Largest logit, log sum exp(logit - largest).


class Options(NamedTuple):
  """Static options.

  Attributes:
    beta, temperature: as in `api.distill`. num_tokens: number of real tokens,
      which come first in the vocabulary. num_chunks: n.
  """

  beta: float
  temperature: float
  num_tokens: int
  num_chunks: int


def distill(
  student: Array,
  student_table: Array,
  teacher: Array,
  teacher_table: Array,
  *,
  beta: float,
  temperature: float,
  num_padding_tokens: int,
  chunk_size: int,
) -> Array:
  """As in `api.distill`; makes arrays of [..., chunk_size] at most."""
  options = Options(
    beta,
    temperature,
    len(student_table) - num_padding_tokens,
    vocabulary.num_chunks(len(student_table), chunk_size),
  )
  tables = (student_table, teacher_table)
  ours, theirs = (vocabulary.fold(x, options.num_chunks) for x in tables)
  return _distill((student, ours), (teacher, theirs), options)


def _logits(readout: Readout, chunk: Array, options: Options) -> Array:
  """Logits [..., C] of a chunk; MASKED_LOGIT for padding tokens."""
  logits, ids = vocabulary.logits(*readout, chunk)
  logits /= options.temperature
  return jnp.where(ids < options.num_tokens, logits, vocabulary.MASKED_LOGIT)


def _normaliser(readout: Readout, options: Options) -> Normaliser:
  hidden, _ = readout
  wide = jnp.promote_types(jnp.float32, hidden.dtype)

  def step(chunk, carry):
    top, total = carry
    logits = _logits(readout, chunk, options)
    higher = jnp.maximum(top, jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - higher[..., None])
    return higher, total * jnp.exp(top - higher) + jnp.sum(weights, axis=-1)

  tokens = hidden.shape[:-1]
  start = jnp.full(tokens, -jnp.inf, wide), jnp.zeros(tokens, wide)
  top, total = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return top, jnp.log(total)


def _log_probabilities(
  readout: Readout, normaliser: Normaliser, chunk: Array, options: Options
) -> Array:
  """Log probabilities [..., C] of a chunk."""
  # Subtract one after the other: their sum would round small differences away.
  top, log_total = (x[..., None] for x in normaliser)
  return (_logits(readout, chunk, options) - top) - log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _distill(student: Readout, teacher: Readout, options: Options) -> Array:
  """`distill` with folded tables."""
  return _forward(student, teacher, options)[0]


def _forward(student, teacher, options):
  readouts = student, teacher
  normalisers = tuple(_normaliser(x, options) for x in readouts)

  def step(chunk, carry):
    logs = (
      _log_probabilities(*pair, chunk, options)
      for pair in zip(readouts, normalisers, strict=True)
    )
    parts = shares(*logs, options.beta)
    return tuple(
      total + jnp.sum(part, axis=-1)
      for total, part in zip(carry, parts, strict=True)
    )

  zeros = jnp.zeros_like(normalisers[0][0])
  from_teacher, from_student = jax.lax.fori_loop(
    0, options.num_chunks, step, (zeros, zeros)
  )
  kept = student, teacher, normalisers, from_student
  return from_teacher + from_student, kept


def _backward(options, residuals, cotangent):
  student, teacher, normalisers, from_student = residuals
  hidden, folded = student
  scale = cotangent[..., None] / options.temperature

  def step(chunk, carry):
    d_hidden, d_folded = carry
    log_s = _log_probabilities(student, normalisers[0], chunk, options)
    log_t = _log_probabilities(teacher, normalisers[1], chunk, options)
    chance = jnp.exp(log_s)
    if options.beta == 0:
      d_logits = chance - jnp.exp(log_t)
    else:
      _, part = shares(log_s, log_t, options.beta)
      d_logits = part - chance * from_student[..., None]
    d_logits = (scale * d_logits).astype(hidden.dtype)
    rows = vocabulary.rows(folded, chunk)
    d_hidden += product("...v,vd->...d", d_logits, rows)
    d_rows = product("...v,...d->vd", d_logits, hidden)
    return d_hidden, vocabulary.put_rows(d_folded, d_rows, chunk)

  start = jnp.zeros(hidden.shape, cotangent.dtype), jnp.zeros_like(folded)
  d_hidden, d_folded = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return (d_hidden.astype(hidden.dtype), d_folded), None


_distill.defvjp(_forward, _backward)
