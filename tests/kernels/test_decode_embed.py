"""`decode_embed` by chunks against the plain form, and both by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vocabulary_examples
from tests_support import assert_close, assert_rounded
from vocabulary_examples import FAST, HIDDEN, ROWS, like

from loopjax.kernels import vocabulary
from loopjax.kernels.decode_embed import decode_embed

WIDTH = 12
CASES = {
  **vocabulary_examples.SIZES,
  "cold": {"vocab": 37, "chunk": 8, "temperature": 1e-3},
  "hot": {"vocab": 37, "chunk": 8, "temperature": 1e3},
  "untied": {"vocab": 37, "chunk": 8, "untied": True, "temperature": 0.7},
  "top_k": {"vocab": 37, "chunk": 8, "top_k": 6, "temperature": 0.7},
  "top_k_over_chunks": {"vocab": 37, "chunk": 5, "top_k": 16, "padding": 3},
  "top_k_prime": {"vocab": 37, "chunk": 8, "top_k": 11, "untied": True},
  "top_1": {"vocab": 37, "chunk": 8, "top_k": 1},
  "top_all": {"vocab": 37, "chunk": 8, "top_k": 34, "padding": 3},
}


def arrays(case, dtype, scale=1.0):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = scale * jax.random.normal(keys[0], (2, 5, WIDTH), dtype)
  table = jax.random.normal(keys[1], (case["vocab"], WIDTH), dtype)
  head = jax.random.normal(keys[2], table.shape, dtype)
  return hidden, table, head if case.get("untied") else None


def options_of(case):
  return {
    "temperature": case.get("temperature", 1.0),
    "top_k": case.get("top_k", 0),
    "num_padding_tokens": case.get("padding", 0),
  }


def values_and_grads(function, operands):
  """(value, gradients of a random projection) by the compiled function."""
  shape = operands[0].shape
  cotangent = jax.random.normal(jax.random.key(9), shape, jnp.bfloat16)
  cotangent = cotangent.astype(operands[0].dtype)  # Exactly, in any dtype.

  def projected(operands):
    value = function(*operands)
    return jnp.vdot(cotangent, value), value

  run = jax.grad(projected, has_aux=True)
  grads, value = jax.jit(run, compiler_options=FAST)(operands)
  return value, grads


def both(case, operands):
  options = options_of(case)
  return (
    values_and_grads(form, operands)
    for form in (
      functools.partial(decode_embed, chunk_size=case["chunk"], **options),
      functools.partial(vocabulary_examples.decode_embed, **options),
    )
  )


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_reference(name):
  with jax.enable_x64(True):
    operands = arrays(CASES[name], jnp.float64)
    actual, expected = both(CASES[name], operands)
    assert actual[0].dtype == jnp.float64
    # A certain token has no gradient; its rounding is divided by tau.
    least = 1 / options_of(CASES[name])["temperature"]
    assert_close(actual, expected, 1e-13, least=least)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ragged", "top_k_over_chunks"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_inputs_add_in_float32(name, dtype):
  operands = arrays(CASES[name], dtype)
  actual, _ = both(CASES[name], operands)
  assert actual[0].dtype == jnp.float32
  assert actual[1][0].dtype == dtype
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), operands)
    _, expected = both(CASES[name], wide)
  # Roundings of weights, of their cotangents and of the result. In float32
  # there are also sums of 37 numbers.
  roundings = {jnp.float32: 40, jnp.bfloat16: 4}[dtype]
  assert_rounded(actual, expected, roundings, dtype)


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize(("offset", "scale"), [(2.0**14, 1.0), (0.0, 1e36)])
def test_large_logits_neither_overflow_nor_lose_their_differences(
  offset, scale, top_k
):
  """Logits up to 1e37; a large log sum exp would round the differences."""
  case = {**CASES["ragged"], "top_k": top_k, "untied": True}
  hidden, table, head = arrays(case, jnp.float32, scale)
  if offset:  # Equal for all logits of a token, with exact sums.
    hidden, head = jnp.round(8 * hidden) / 8, jnp.round(8 * head) / 8
    head = head.at[:, 0].set(1.0)
    hidden = hidden.at[..., 0].set(offset)
  actual, expected = both(case, (hidden, table, head))
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(actual))
  assert_close(actual[0], expected[0], 1e-5)
  assert_close(actual[1][1], expected[1][1], 1e-5)


def test_reference_by_hand():
  """Equation 5 in NumPy, token by token, and its top-k form."""
  hidden, table, head = arrays({"vocab": 9, "untied": True}, jnp.float32)
  options = {"temperature": 0.7, "num_padding_tokens": 2}
  form = functools.partial(vocabulary_examples.decode_embed, **options)
  whole, few = (form(hidden, table, head, top_k=k) for k in (0, 3))
  h, e, u = (np.asarray(x, np.float64) for x in (hidden, table, head))
  for b in range(2):
    for t in range(5):
      logits = np.array([u[v] @ h[b, t] / 0.7 for v in range(7)])
      weights = np.exp(logits) / np.exp(logits).sum()
      mean = sum(weights[v] * e[v] for v in range(7))
      np.testing.assert_allclose(whole[b, t], mean, atol=1e-5)
      best = np.argsort(logits)[-3:]
      mean = weights[best] @ e[best] / weights[best].sum()
      np.testing.assert_allclose(few[b, t], mean, atol=1e-5)


def test_both_roles_of_a_tied_table_get_a_gradient():
  """The tied gradient is the sum of the untied ones."""
  case = CASES["padding"]
  hidden, table, _ = arrays(case, jnp.float32)
  options = {**options_of(case), "chunk_size": 8}
  form = functools.partial(decode_embed, **options)
  _, (_, tied, _) = values_and_grads(form, (hidden, table, None))
  _, (_, as_table, as_head) = values_and_grads(form, (hidden, table, table))
  assert jnp.abs(as_table).max() > 0.1
  assert jnp.abs(as_head).max() > 0.1
  np.testing.assert_allclose(tied, as_table + as_head, atol=1e-5)
  assert (tied[-6:] == 0).all()


@pytest.mark.parametrize(
  ("vocab", "chunk", "chunks", "size"),
  [
    (129_280, 2048, 101, 1280),  # 2^8 is in every chunk.
    (50_304, 2048, 48, 1048),
    (49_152, 2048, 24, 2048),
    (4099, 2048, 3, 1367),  # A prime: two padding rows.
    (1050, 2048, 1, 1050),
    (3, 1, 3, 1),
  ],
)
def test_chunks_divide_the_vocabulary_where_they_can(
  vocab, chunk, chunks, size
):
  assert vocabulary.num_chunks(vocab, chunk) == chunks
  assert -(-vocab // chunks) == size <= chunk


@pytest.mark.parametrize("top_k", [0, 32])
def test_chunks_keep_no_array_of_the_vocabulary(top_k):
  """512 tokens, 16,384 rows: one [N, V] array is 32 MiB."""
  shapes = like(4, 128, 16), like(16_384, 16)

  def temporaries(form):
    def loss(hidden, table):
      return jnp.sum(form(hidden, table, top_k=top_k) ** 2)

    run = jax.jit(jax.grad(loss, (0, 1)))
    memory = run.lower(*shapes).compile(FAST).memory_analysis()
    return memory.temp_size_in_bytes

  whole = temporaries(vocabulary_examples.decode_embed)
  chunks = temporaries(decode_embed)
  assert whole > 60 * 2**20
  assert chunks < whole / 5
  assert chunks < 4.5 * 4 * 512 * vocabulary.CHUNK_SIZE  # Float32 [N, chunk].


@pytest.mark.parametrize("top_k", [0, 16])
def test_a_mesh_changes_nothing_and_gathers_the_table_once(top_k):
  with jax.enable_x64(True):  # XLA splits programs in any dtype alike.
    hidden, table, _ = arrays({"vocab": 4608}, jnp.float64)
    hidden = jnp.concatenate([hidden] * 4)

  def loss(hidden, table):
    return jnp.sum(decode_embed(hidden, table, top_k=top_k) ** 2)

  with jax.enable_x64(True):
    text = vocabulary_examples.on_a_mesh(loss, (hidden, table), (HIDDEN, ROWS))
  whole = re.findall(r"= f64\[4608,12\]\S* (\S+)\(", text)
  moved = sorted(name for name in whole if name.startswith("all-"))
  assert moved == (["all-gather", "all-reduce"] if top_k else [])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("top_k", [0, 32])
def test_lowers_for_accelerators(platform, top_k):
  def loss(hidden, table):
    return jnp.sum(decode_embed(hidden, table, top_k=top_k) ** 2)

  operands = (
    like(8, 128, 256, dtype=jnp.bfloat16),
    like(129_280, 256, dtype=jnp.bfloat16),
  )
  vocabulary_examples.assert_lowers(loss, operands, platform)
