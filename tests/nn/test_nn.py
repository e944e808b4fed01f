"""Layers against their formulas in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_layers import gelu, rms_normed, silu

from loopjax.kernels import vocabulary
from loopjax.nn import attention, block, linear, mlp, norm, rope
from loopjax.nn.shape import Shape
from loopjax.types import Precision

RNGS = nnx.Rngs(params=0)
SHAPE = Shape(8, 2, num_key_value_heads=2, head_width=4, mlp_width=16)
X = np.asarray(jax.random.normal(jax.random.key(1), (2, 5, 8)))
erf = np.vectorize(math.erf)


def test_derf_utm_is_its_formula():
  layer = norm.DerfUTM(8, precision=Precision(), rngs=RNGS)
  alpha = np.asarray(layer.alpha[...])
  np.testing.assert_allclose(layer(X), erf(alpha * X), atol=1e-6)
  rngs = nnx.Rngs(params=1)
  wide = norm.DerfUTM(4096, precision=Precision(), rngs=rngs).alpha[...]
  assert abs(wide.mean() - 1) < 5 * 0.02 / 64  # Five standard errors.
  assert abs(wide.std() - 0.02) < 5 * 0.02 / 64 / math.sqrt(2)


def test_derf_is_its_formula():
  layer = norm.Derf(8, precision=Precision(), rngs=RNGS)
  np.testing.assert_allclose(layer(X), erf(0.5 * X), atol=1e-6)
  layer.gain[...] = jnp.arange(8.0)
  layer.bias[...] = jnp.ones(8)
  expected = np.arange(8.0) * erf(0.5 * X) + 1
  np.testing.assert_allclose(layer(X), expected, atol=1e-5)


def test_norms_normalise():
  rms = norm.rms_norm(8, precision=Precision(), rngs=RNGS)(X)
  np.testing.assert_allclose(np.mean(rms**2, -1), 1, atol=1e-4)
  layer = norm.layer_norm(8, precision=Precision(), rngs=RNGS)(X)
  np.testing.assert_allclose(np.mean(layer, -1), 0, atol=1e-5)
  np.testing.assert_allclose(np.var(layer, -1), 1, atol=1e-4)


@pytest.mark.parametrize("kind", list(norm.NORMS))
def test_norms_of_bfloat16_are_float32(kind):
  layer = norm.NORMS[kind](
    8, precision=Precision(compute=jnp.bfloat16), rngs=RNGS
  )
  assert layer(X.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize(
  ("position", "angles"),
  [
    ([3], [3.0, 0.3]),  # 100^(-0/2), 100^(-1/2).
    # Coordinates in turn, each with its own frequencies.
    ([3, 5], [3.0, 5.0, 0.3, 0.5]),
  ],
)
def test_rotation_turns_every_pair_by_its_angle(position, angles):
  positions, pairs = jnp.array([[0] * len(position), position]), len(angles)
  tables = rope.rope_tables(positions, 2 * pairs, 100.0)
  x = jax.random.normal(jax.random.key(0), (1, 2, 1, 2 * pairs))
  got, x = np.asarray(rope.rotate(x, tables)), np.asarray(x)
  np.testing.assert_allclose(got[0, 0], x[0, 0], atol=1e-6)
  for pair, angle in enumerate(angles):
    turned = complex(x[0, 1, 0, pair], x[0, 1, 0, pair + pairs])
    turned *= np.exp(1j * angle)
    np.testing.assert_allclose(got[0, 1, 0, pair], turned.real, atol=1e-5)
    np.testing.assert_allclose(
      got[0, 1, 0, pair + pairs], turned.imag, atol=1e-5
    )


def test_rotated_products_depend_on_differences():
  query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 12))

  def product(first, second):
    tables = [
      rope.rope_tables(jnp.array([p]), 12, 50.0) for p in (first, second)
    ]
    return jnp.sum(rope.rotate(query, tables[0]) * rope.rotate(key, tables[1]))

  near, far = product([1, 2, 0], [3, 2, 4]), product([4, 7, 1], [6, 7, 5])
  np.testing.assert_allclose(near, far, atol=1e-4)
  assert abs(near - product([1, 2, 0], [3, 3, 4])) > 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_is_softmax_of_rotated_products(causal, qk_norm):
  shape = dataclasses.replace(
    SHAPE, causal=causal, qk_norm=norm.rms_norm if qk_norm else norm.identity
  )
  layer = attention.Attention(shape, precision=Precision(), rngs=RNGS)
  tables = rope.rope_tables(jnp.arange(5)[:, None], 4, 100.0)
  metadata = attention.Metadata(tables)
  if qk_norm:  # Equal gains would commute with the rotation.
    layer.query_norm.scale[...] = jnp.array([0.5, 1.0, 2.0, -1.0])
    layer.key_norm.scale[...] = jnp.array([1.5, -0.5, 1.0, 0.7])

  def heads(linear):
    return (X @ np.asarray(linear.kernel[...])).reshape(2, 5, 2, 4)

  def rotated(name):
    x = heads(getattr(layer, name))
    if qk_norm:
      x = rms_normed(x) * np.asarray(getattr(layer, f"{name}_norm").scale[...])
    return np.asarray(rope.rotate(x, tables))

  query, key = rotated("query"), rotated("key")
  logits = np.einsum("bthk,bshk->bhts", query, key) / 2
  if causal:
    logits[..., np.triu(np.ones((5, 5), bool), 1)] = -np.inf
  weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  mixed = np.einsum("bhts,bshk->bthk", weights, heads(layer.value))
  expected = mixed.reshape(2, 5, 8) @ np.asarray(layer.output.kernel[...])
  np.testing.assert_allclose(layer(X, metadata)[0], expected, atol=1e-4)
  np.testing.assert_allclose(layer.weights(X, metadata), weights, atol=1e-5)


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_swiglu_is_its_formula(kind):
  layer = mlp.MLPS[kind](8, 6, precision=Precision(), rngs=RNGS)
  gate = X @ np.asarray(layer.gate.kernel[...])
  value = X @ np.asarray(layer.value.kernel[...])
  gate = gelu(gate) if kind == "geglu" else silu(gate)
  expected = (gate * value) @ np.asarray(layer.output.kernel[...])
  np.testing.assert_allclose(layer(X), expected, atol=1e-5)


def test_gelu_is_its_formula():
  layer = mlp.MLPS["gelu"](8, 6, precision=Precision(), rngs=RNGS)
  expected = gelu(X @ np.asarray(layer.value.kernel[...]))
  expected = expected @ np.asarray(layer.output.kernel[...])
  np.testing.assert_allclose(layer(X), expected, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_normalise_is_its_formula(epsilon):
  expected = X / np.sqrt(np.mean(X**2, -1, keepdims=True) + epsilon)
  actual = norm.rms_normalise(X.astype(jnp.bfloat16), epsilon)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, atol=0.02)
  exact = norm.rms_normalise(X, epsilon)
  np.testing.assert_allclose(exact, expected, atol=1e-5)


def test_rms_normalise_of_nothing_is_nothing():
  def norm_of(x):
    return jnp.sum(norm.rms_normalise(x, 1e-6))

  assert norm_of(jnp.zeros(4)) == 0
  assert jnp.isfinite(jax.grad(norm_of)(jnp.zeros(4))).all()


def test_padding_logits_are_masked_and_finite():
  table = jax.random.normal(jax.random.key(2), (7, 8))
  logits = linear.token_logits(X, table)
  np.testing.assert_allclose(logits, X @ np.asarray(table).T, atol=1e-5)
  masked = linear.token_logits(X, table, num_padding_tokens=3)
  assert jnp.array_equal(masked[..., :4], logits[..., :4])
  assert (masked[..., 4:] == vocabulary.MASKED_LOGIT).all()
  assert (0.0 * masked == 0).all()


def test_residual_branches_have_names_for_rematerialisation():
  """Saving only the named values recomputes the rest."""
  layer = block.Block(SHAPE, precision=Precision(), rngs=RNGS)
  tables = rope.rope_tables(jnp.arange(5)[:, None], 4, 100.0)
  metadata = attention.Metadata(tables)
  text = str(jax.make_jaxpr(lambda x: layer(x, metadata))(X))
  assert "name=attention" in text
  assert "name=mlp" in text
