"""Reference implementation of `distill` in plain JAX."""

import math

import jax
import jax.numpy as jnp

from loopjax.kernels.vocabulary import MASKED_LOGIT, product
from loopjax.types import Array


def distill(
  student: Array,
  student_table: Array,
  teacher: Array,
  teacher_table: Array,
  *,
  beta: float,
  temperature: float,
  num_padding_tokens: int,
) -> Array:
  """As in `api.distill`; makes arrays [..., V]."""
  num_tokens = len(student_table) - num_padding_tokens

  def log_softmax(hidden: Array, table: Array) -> Array:
    logits = product("...d,vd->...v", hidden, table) / temperature
    token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    logits = jnp.where(token < num_tokens, logits, MASKED_LOGIT)
    return jax.nn.log_softmax(logits, axis=-1)

  log_s = log_softmax(student, student_table)
  log_t = log_softmax(teacher, teacher_table)
  from_teacher, from_student = shares(log_s, log_t, beta)
  return jnp.sum(from_teacher + from_student, axis=-1)


def shares(log_s: Array, log_t: Array, beta: float) -> tuple[Array, Array]:
  """Each token's part of the two weighted divergences.

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
