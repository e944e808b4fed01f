"""Chunks that use each other's rows, against plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import array_sizes, assert_close

from loopjax.kernels.gated_kv import Weights, reference
from loopjax.loop import chunks
from loopjax.nn.attention import dot_product

FAST = {"xla_backend_optimization_level": 0}
BATCH, HEADS, HEAD_WIDTH, LOOPS = 2, 2, 4, 3
WIDTH = HEADS * HEAD_WIDTH


def melt(params, x, tables, history, first):
  """Loops over one layer with a gated latent; the last loop's rows stay."""
  latent, total = None, 0.0
  for _ in range(LOOPS):
    query, weights = x @ params["query"], params["weights"]
    latent, own = reference.gated_kv(x, latent, weights, tables)
    query = reference.rotate(query.reshape(own[0].shape), tables)
    own_seen = jnp.tril(jnp.ones((1, x.shape[1], x.shape[1]), bool))
    seen = jnp.arange(history[0].shape[1]) < first
    seen = jnp.broadcast_to(seen, (1, x.shape[1], len(seen)))
    parts = (*own, own_seen), (*history, seen)
    mixed = dot_product.attend_to_parts(query, *parts)
    x = jnp.tanh(x + mixed.reshape(x.shape) @ params["output"])
    total += jnp.sum(x**2, axis=(1, 2))
  return (x, total), own


def arrays(num_chunks, size, dtype=jnp.float64):
  random = np.random.default_rng(num_chunks)

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape) * shape[-1] ** -0.5, dtype)

  square = [normal(WIDTH, WIDTH) for _ in range(6)]
  weights = Weights(*square[:2], normal(WIDTH), *square[2:4])
  params = {"query": square[4], "output": square[5], "weights": weights}
  inputs = 3 * normal(num_chunks, BATCH, size, WIDTH)
  angle = random.normal(size=(num_chunks, BATCH, size, HEAD_WIDTH // 2))
  tables = tuple(jnp.asarray(f(angle), dtype) for f in (np.cos, np.sin))
  rows = (BATCH, num_chunks * size, HEADS, HEAD_WIDTH)
  # Unwritten rows must have no effect.
  history = tuple(jnp.full(rows, 1e3, dtype) for _ in range(2))
  return params, inputs, tables, history


def unrolled(params, inputs, tables, history):
  """The same chunk by chunk in Python."""
  size = inputs.shape[2]
  outputs = []
  for i in range(len(inputs)):
    chunk = [x[i] for x in tables]
    result, rows = melt(params, inputs[i], chunk, history, i * size)
    outputs.append(result)
    history = tuple(
      x.at[:, i * size : (i + 1) * size].set(part)
      for x, part in zip(history, rows, strict=True)
    )
  return jax.tree.map(lambda *x: jnp.stack(x), *outputs), history


def scanned(params, inputs, tables, history):
  return chunks.run(melt, params, inputs, tables, history)


def gradients(form, params, inputs, tables, history):
  """Results, and gradients of a scalar that depends on all of them."""

  def value(params, inputs):
    results = form(params, inputs, tables, history)
    total = 0.0
    for i, x in enumerate(jax.tree.leaves(results)):
      total += jnp.sum(np.random.default_rng(i).normal(size=x.shape) * x)
    return total, results

  run = jax.grad(value, (0, 1), has_aux=True)
  return jax.jit(run, compiler_options=FAST)(params, inputs)


def test_gradients_are_autodiff_of_the_unrolled_chunks():
  with jax.enable_x64(True):
    operands = arrays(4, 3)
    actual, expected = (
      gradients(form, *operands) for form in (scanned, unrolled)
    )
  assert_close(actual, expected, 1e-10)
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected))


@pytest.mark.long
def test_stages_of_chunks_get_the_rows_that_they_read(monkeypatch):
  """And the same results and gradients as with complete buffers."""
  rows = []

  def step(params, x, tables, history, first):
    rows.append(history[0].shape[1])
    return melt(params, x, tables, history, first)

  def staged(*operands):
    return chunks.run(step, *operands)

  with jax.enable_x64(True):
    operands = arrays(5, 2)
    whole = gradients(staged, *operands)
    assert set(rows) == {10}
    rows.clear()
    monkeypatch.setattr(chunks, "_MIN_ROWS", 4)  # Chunks 0 and 1; 2 to 4.
    parts = gradients(staged, *operands)
  assert set(rows) == {2, 8}
  assert_close(parts, whole, 1e-10)


@pytest.mark.long
def test_one_buffer_is_kept():
  """With 16 chunks; autodiff of the scan stores the buffer of each."""
  num_chunks, size = 16, 8
  operands = arrays(num_chunks, size, jnp.float32)

  def plain(params, inputs, tables, history):
    (outputs, history), _ = chunks._forward(
      melt, params, inputs, tables, history
    )
    return outputs, history

  def compiled(form):
    def value(params, inputs, tables, history):
      (x, total), _ = form(params, inputs, tables, history)
      return jnp.sum(x) + jnp.sum(total)

    run = jax.jit(jax.grad(value), compiler_options=FAST)
    return run.lower(*operands).compile()

  whole, ours = compiled(plain), compiled(scanned)
  buffer = operands[3][0].size
  assert max(array_sizes(whole.as_text())) == num_chunks * buffer
  assert max(array_sizes(ours.as_text())) < 4 * buffer
  memory = [x.memory_analysis().temp_size_in_bytes for x in (whole, ours)]
  assert memory[1] < memory[0] / 4
