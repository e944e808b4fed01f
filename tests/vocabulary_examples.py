"""Operators over a vocabulary in plain JAX, and comparisons with chunked ones.

The plain forms create arrays [..., V].
"""

import functools
import math

import jax
import jax.numpy as jnp
import tests_support
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests_support import array_sizes

from loopjax import program, sharding
from loopjax.kernels.vocabulary import CHUNK_SIZE, MASKED_LOGIT, product

FAST = {"xla_backend_optimization_level": 0}
# A vocabulary, its padding and the size of a chunk.
SIZES = {
  "ragged": {"vocab": 37, "chunk": 8},
  "one_chunk": {"vocab": 37, "chunk": 64},
  "one_row_chunks": {"vocab": 5, "chunk": 1},
  "one_token": {"vocab": 1, "chunk": 8},
  "padding": {"vocab": 37, "chunk": 8, "padding": 6},
  "padding_fills_a_chunk": {"vocab": 32, "chunk": 8, "padding": 9},
}
# Splits of hidden states and of a table over 2 x 2 devices each.
HIDDEN, ROWS = P(("data", "fsdp")), P(("tensor", "fsdp"))
# Some gradients are 0 but for rounding.
assert_close = functools.partial(tests_support.assert_close, least=1e-3)


def _logits(
  hidden, table, num_padding_tokens, temperature=1.0, of_padding=MASKED_LOGIT
):
  logits = product("...d,vd->...v", hidden, table) / temperature
  token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  real = token < len(table) - num_padding_tokens
  return jnp.where(real, logits, of_padding)


def token_loss(hidden, table, targets, *, num_padding_tokens=0):
  """As `losses.tokens.token_loss`."""
  logits = _logits(hidden, table, num_padding_tokens)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def distill(
  student,
  student_table,
  teacher,
  teacher_table,
  *,
  beta=0.5,
  num_padding_tokens=0,
):
  """As `losses.distill`, from the logarithm of the mean of two softmaxes."""
  log_s, log_t = (
    jax.nn.log_softmax(_logits(*pair, num_padding_tokens))
    for pair in ((student, student_table), (teacher, teacher_table))
  )
  if beta == 0:
    return jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
  if beta == 1:
    return jnp.sum(jnp.exp(log_s) * (log_s - log_t), axis=-1)
  log_m = jnp.logaddexp(math.log(beta) + log_t, math.log1p(-beta) + log_s)
  return jnp.sum(
    beta * jnp.exp(log_t) * (log_t - log_m)
    + (1 - beta) * jnp.exp(log_s) * (log_s - log_m),
    axis=-1,
  )


def decode_embed(
  hidden, table, head=None, *, temperature=1.0, top_k=0, num_padding_tokens=0
):
  """As `kernels.decode_embed.decode_embed`."""
  head = table if head is None else head
  logits = _logits(hidden, head, num_padding_tokens, temperature, -jnp.inf)
  if not top_k:
    weights = jax.nn.softmax(logits, axis=-1)
    return product("...v,vd->...d", weights.astype(table.dtype), table)
  best, ids = jax.lax.top_k(logits, top_k)
  weights = jax.nn.softmax(best, axis=-1)
  return product("...k,...kd->...d", weights.astype(table.dtype), table[ids])


def on_a_mesh(loss, operands, splits, tolerance=1e-12):
  """Text of the program on 2 x 2 x 2 devices, after checking equal results.

  The gradients are of the first two operands, and split like these. The
  tolerance is for operands in float64.
  """
  config = sharding.Config(data=2, fsdp=2, tensor=2)
  mesh = sharding.make_mesh(config, jax.devices())
  run = jax.value_and_grad(loss, (0, 1))
  expected = jax.jit(run, compiler_options=FAST)(*operands)
  splits = tuple(NamedSharding(mesh, split) for split in splits)
  compiled = jax.jit(
    program.on_mesh(mesh, run),
    in_shardings=splits,
    out_shardings=(None, splits[:2]),
  )
  compiled = compiled.lower(*operands).compile(FAST)
  actual = compiled(*jax.device_put(operands, splits))
  assert_close(actual, expected, tolerance)
  return compiled.as_text()


def assert_no_array_of_the_vocabulary(
  plain, chunked, operands, backward, share
):
  """Arrays have at most the size of a chunk or of the table.

  For 512 tokens and 16,384 rows. Both forms compute a loss; temporaries of the
  chunked form take less than `share` of the plain form's.
  """
  whole, parts = (
    compiled(form, operands, backward) for form in (plain, chunked)
  )
  assert max(array_sizes(whole.as_text())) == 512 * 16_384
  assert max(array_sizes(parts.as_text())) == 512 * CHUNK_SIZE
  before, after = (
    program.memory_analysis().temp_size_in_bytes for program in (whole, parts)
  )
  assert after < share * before


def compiled(loss, operands, backward):
  """A program for float32 operands of these shapes, int32 for one dimension."""
  run = jax.grad(loss, (0, 1)) if backward else loss
  return jax.jit(run).lower(*operands).compile(FAST)


def assert_lowers(loss, operands, platform):
  """Also its gradients, without an array [..., V]."""
  table = "x".join(map(str, operands[1].shape))
  vocab = operands[1].shape[0]
  lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*operands)
  text = lowered.lower(lowering_platforms=(platform,)).as_text()
  assert f"{table}xbf16" in text
  assert f"x{vocab}x" not in text
  assert f"x{vocab}xf32" not in text


def like(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)
