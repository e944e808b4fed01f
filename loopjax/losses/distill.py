"""Distillation from a teacher's distributions over tokens, in nats.

`distill` processes the vocabulary in chunks and has a custom backward pass.

The first pass over the vocabulary finds both normalisers
(`vocabulary.add_logits`), the second the divergence, since M needs both. The
backward pass keeps hidden states, normalisers and the student's part R of the
divergence, and recomputes the logits. With the student's logits l and a
cotangent of 1,

  dL/dl_v = S_v - T_v                                  for beta = 0,
  dL/dl_v = (1 - beta) S_v log(S_v / M_v) - S_v R      for 0 < beta < 1,
    R = (1 - beta) KL(S || M),

and for beta = 1 the second with T for M and without the factor (1 - beta).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels import vocabulary
from loopjax.kernels.vocabulary import product
from loopjax.losses.tokens import means_by_loop
from loopjax.types import PRECISIONS, Array, Batch

Readout = tuple[Array, Array]  # Hidden states [..., D], folded table [C, n, D].
Normaliser = tuple[Array, Array]  # Largest logit, log sum exp(logit - largest).


class Options(NamedTuple):
  """Static options.

  Attributes:
    beta: as in `distill`.
    num_tokens: real tokens, which come first in the vocabulary.
    num_chunks: n.
  """

  beta: float
  num_tokens: int
  num_chunks: int


def by_loop(
  student: Any,
  hidden: Array,
  teacher: Any,
  teacher_hidden: Array,
  batch: Batch,
  beta: float,
) -> Array:
  """Divergence from the teacher after each loop, weighted by token.

  MELT distils every loop of the student (arXiv 2605.07721, section 3.3).
  Creates no [tokens, vocabulary] array; see `distill`.

  Args:
    student: the model, whose output table and precision are used.
    hidden: its hidden states before unembedding after each of K loops, [K, B,
      T, D].
    teacher: the teacher, whose output table is used. A constant.
    teacher_hidden: [K, B, T, D'] loop by loop, or [1, B, T, D'] for the same
      teacher after every loop. A constant.
    batch: "weights" [B, T], and optionally "mean_weight".
    beta: as in `distill`.

  Returns:
    f32 [K], the mean over tokens after each loop.
  """
  operands = (
    hidden,
    student.readout_table(),
    teacher_hidden,
    teacher.readout_table(),
  )
  dtype = PRECISIONS[student.config.precision].compute
  divergence = distill(
    *(x.astype(dtype) for x in operands),
    beta=beta,
    num_padding_tokens=student.spec.num_padding_tokens,
  )
  return means_by_loop(divergence, batch)


@jax.named_scope("read_out")
def distill(
  student: Array,
  student_table: Array,
  teacher: Array,
  teacher_table: Array,
  *,
  beta: float = 0.5,
  num_padding_tokens: int = 0,
  chunk_size: int = vocabulary.CHUNK_SIZE,
) -> Array:
  """Divergence of a student's distribution over tokens from a teacher's.

  With S = softmax(student W_S^T), T = softmax(teacher W_T^T) and
  M = beta T + (1 - beta) S, per token

    beta KL(T || M) + (1 - beta) KL(S || M)   for 0 < beta < 1,
    KL(T || S)                                for beta = 0,
    KL(S || T)                                for beta = 1.

  The first is the generalized Jensen-Shannon divergence (GKD, arXiv
  2306.13649), which tends to 0 at both ends; the others are its limits after
  division by beta and by 1 - beta.

  Products do not convert their inputs and accumulate in float32; both softmax
  functions are in float32. Supports reverse mode only.

  Args:
    student: [..., D_S], for example [K, B, T, D_S] for K loops.
    student_table: W_S [V, D_S] in the student's dtype.
    teacher: [..., D_T], with the student's leading dimensions, or 1 for some of
      them: one teacher for all loops is [1, B, T, D_T]. A constant.
    teacher_table: W_T [V, D_T]. A constant.
    beta: from 0 to 1.
    num_padding_tokens: the last ids of the vocabulary get no probability.
    chunk_size: no array is larger than [..., chunk_size] or the table.

  Returns:
    [...] in nats, in float32, or float64 for float64 inputs.

  Raises:
    ValueError: shapes or options do not fit.
  """
  lead = student.shape[:-1]
  if teacher.ndim != student.ndim or any(
    theirs not in (1, ours)
    for theirs, ours in zip(teacher.shape[:-1], lead, strict=True)
  ):
    raise ValueError(
      f"teacher must be {(*lead, 'D')}, or 1 in place of some of these, not"
      f" {teacher.shape}"
    )
  if len(student_table) != len(teacher_table):
    raise ValueError(
      f"student_table has {len(student_table)} tokens, teacher_table has"
      f" {len(teacher_table)}"
    )
  if not 0 <= beta <= 1:
    raise ValueError(f"beta={beta} must be from 0 to 1")
  options = Options(
    float(beta),
    len(student_table) - num_padding_tokens,
    vocabulary.num_chunks(len(student_table), chunk_size),
  )
  teacher, teacher_table = jax.lax.stop_gradient((teacher, teacher_table))
  tables = (student_table, teacher_table)
  ours, theirs = (vocabulary.fold(x, options.num_chunks) for x in tables)
  return _distill((student, ours), (teacher, theirs), options)


def _logits(readout: Readout, chunk: Array, options: Options) -> Array:
  """Logits [..., C] of a chunk; MASKED_LOGIT for padding tokens."""
  logits, ids = vocabulary.logits(*readout, chunk)
  return jnp.where(ids < options.num_tokens, logits, vocabulary.MASKED_LOGIT)


def _normaliser(readout: Readout, options: Options) -> Normaliser:
  hidden, _ = readout
  wide = jnp.promote_types(jnp.float32, hidden.dtype)

  def step(chunk, sums):
    return vocabulary.add_logits(*sums, _logits(readout, chunk, options))[:2]

  tokens = hidden.shape[:-1]
  start = jnp.full(tokens, -jnp.inf, wide), jnp.zeros(tokens, wide)
  top, total = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return top, jnp.log(total)


def _log_probabilities(
  readout: Readout, normaliser: Normaliser, chunk: Array, options: Options
) -> Array:
  """Log probabilities [..., C] of a chunk."""
  # Two subtractions: adding the normalisers first would lose small differences.
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
    parts = _shares(*logs, options.beta)
    return tuple(
      total + jnp.sum(part, axis=-1)
      for total, part in zip(carry, parts, strict=True)
    )

  zeros = jnp.zeros_like(normalisers[0][0])
  from_teacher, from_student = jax.lax.fori_loop(
    0, options.num_chunks, step, (zeros, zeros)
  )
  residuals = student, teacher, normalisers, from_student
  return from_teacher + from_student, residuals


def _backward(options, residuals, cotangent):
  student, teacher, normalisers, from_student = residuals
  hidden, folded = student

  def step(chunk, carry):
    d_hidden, d_folded = carry
    log_s = _log_probabilities(student, normalisers[0], chunk, options)
    log_t = _log_probabilities(teacher, normalisers[1], chunk, options)
    student_probability = jnp.exp(log_s)
    if options.beta == 0:
      d_logits = student_probability - jnp.exp(log_t)
    else:
      _, part = _shares(log_s, log_t, options.beta)
      d_logits = part - student_probability * from_student[..., None]
    d_logits = (cotangent[..., None] * d_logits).astype(hidden.dtype)
    rows = vocabulary.rows(folded, chunk)
    d_hidden += product("...v,vd->...d", d_logits, rows)
    d_rows = product("...v,...d->vd", d_logits, hidden)
    return d_hidden, vocabulary.put_rows(d_folded, d_rows, chunk)

  start = jnp.zeros(hidden.shape, cotangent.dtype), jnp.zeros_like(folded)
  d_hidden, d_folded = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return (d_hidden.astype(hidden.dtype), d_folded), None


_distill.defvjp(_forward, _backward)


def _shares(log_s: Array, log_t: Array, beta: float) -> tuple[Array, Array]:
  """Each token's terms of the two weighted divergences.

  Args:
    log_s, log_t: log probabilities of tokens, finite, [..., v].

  Returns:
    beta T log(T / M) and (1 - beta) S log(S / M). For beta = 0 and beta = 1,
    only T log(T / S) or S log(S / T); the other is 0.
  """
  if beta == 0:
    return jnp.exp(log_t) * (log_t - log_s), jnp.zeros_like(log_s)
  if beta == 1:
    return jnp.zeros_like(log_s), jnp.exp(log_s) * (log_s - log_t)
  log_m = jnp.logaddexp(math.log(beta) + log_t, math.log1p(-beta) + log_s)
  return (
    beta * jnp.exp(log_t) * (log_t - log_m),
    (1 - beta) * jnp.exp(log_s) * (log_s - log_m),
  )
