"""Inputs of gated_kv, and its result in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from tests_support import assert_rounded

from loopjax.kernels.gated_kv import Weights, gated_kv

FAST = {"xla_backend_optimization_level": 0}


def arrays(dtype, *, batch, tokens, width, heads, head_width, rows, start):
  """inputs, latent, weights, tables, cache and start."""
  random = np.random.default_rng(tokens)
  columns = heads * head_width

  def normal(*shape, scale=1.0):
    return jnp.asarray(scale * random.normal(size=shape), dtype)

  weights = Weights(
    *(normal(width, n, scale=width**-0.5) for n in (width, width)),
    normal(width),
    *(normal(width, n, scale=width**-0.5) for n in (columns, columns)),
  )
  cache = tuple(normal(batch, rows, heads, head_width) for _ in range(2))
  angle = 3.0 * random.normal(size=(batch, tokens, head_width // 2))
  wide = jnp.promote_types(jnp.float32, dtype)
  tables = tuple(jnp.asarray(f(angle), wide) for f in (np.cos, np.sin))
  inputs, latent = (normal(batch, tokens, width) for _ in range(2))
  return inputs, latent, weights, tables, cache, jnp.asarray(start, jnp.int32)


def by_hand(inputs, latent, weights, tables, cache, start):
  """The same in float64, token by token."""
  leaves, tree = jax.tree.flatten((inputs, latent, weights, tables, cache))
  leaves = [np.array(x, np.float64) for x in leaves]
  x, h, weights, (cos, sin), (keys, values) = tree.unflatten(leaves)
  after = np.zeros_like(x)
  num_tokens, half = x.shape[1], keys.shape[-1] // 2
  for b, s in np.ndindex(x.shape[:2]):
    kept = x[b, s] @ weights.gate_input + h[b, s] @ weights.gate_latent
    kept = 1 / (1 + np.exp(-kept - weights.gate_bias))
    after[b, s] = kept * h[b, s] + (1 - kept) * x[b, s]
    if not 0 <= start[b] <= keys.shape[1] - num_tokens:
      continue
    row = start[b] + s
    values[b, row] = (after[b, s] @ weights.value).reshape(values.shape[2:])
    for g, key in enumerate((after[b, s] @ weights.key).reshape(-1, 2 * half)):
      for i in range(half):
        turn = (cos[b, s, i] + 1j * sin[b, s, i]) * (
          key[i] + 1j * key[half + i]
        )
        keys[b, row, g, i], keys[b, row, g, half + i] = turn.real, turn.imag
  return after, (keys, values)


def differentiated(form, operands):
  """Results and gradients, each weighted by its own random numbers."""
  inputs, latent, weights, tables, cache, start = operands

  def value(inputs, latent, weights, cache):
    results = form(inputs, latent, weights, tables, cache, start)
    total = 0.0
    for i, x in enumerate(jax.tree.leaves(results)):
      wide = jnp.promote_types(jnp.float32, x.dtype)
      factor = np.random.default_rng(i).normal(size=x.shape)
      total += jnp.sum(factor.astype(wide) * x.astype(wide))
    return total, results

  run = jax.grad(value, (0, 1, 2, 3), has_aux=True)
  run = jax.jit(run, compiler_options=FAST)
  grads, results = run(inputs, latent, weights, cache)
  return results, grads


def in_float64(operands):
  """Results and gradients without rounding."""
  with jax.enable_x64(True):
    *floats, start = operands
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), floats)
    return differentiated(gated_kv, (*wide, start))


def assert_only_rounded(actual, operands):
  """Results and gradients in bfloat16.

  Four successive roundings: of the latent or the cotangents of keys, of the
  latent's cotangent, of the gate's, and of the result.
  """
  assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype("bfloat16")}
  assert_rounded(actual, in_float64(operands), roundings=4)
