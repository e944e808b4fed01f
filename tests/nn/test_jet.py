"""The Jet block: dynamic convolution by hand, initial values, parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_layers import silu

from loopjax.errors import UserError
from loopjax.nn.fast_weights.convolution import DynamicConvolution
from loopjax.nn.fast_weights.jet import JetBlock
from loopjax.types import Precision

FAST = {"xla_backend_optimization_level": 0}
NORMAL = nnx.initializers.normal(0.02)
X = jax.random.normal(jax.random.key(1), (2, 9, 12))
VALUE = jax.random.normal(jax.random.key(2), (2, 9, 16))


def build(*sizes):
  return JetBlock(*sizes, precision=Precision(), rngs=nnx.Rngs(params=0))


def convolution(scale=0.0):
  """A layer whose parameters are `scale` away from their initial values."""
  layer = DynamicConvolution(
    12, 16, 4, init=NORMAL, precision=Precision(), rngs=nnx.Rngs(params=0)
  )
  random = np.random.default_rng(3)
  for name in ("hidden", "taps"):
    part = getattr(layer, name)
    part.kernel[...] += scale * random.normal(size=part.kernel.shape)
  layer.taps.bias[...] += scale * random.normal(size=layer.taps.bias.shape)
  return layer


def test_dynamic_convolution_by_hand():
  layer = convolution(0.5)
  tail = jax.random.normal(jax.random.key(3), (2, 3, 16))
  x, value, before = (np.asarray(a, np.float64) for a in (X, VALUE, tail))
  hidden = silu(x @ np.asarray(layer.hidden.kernel[...]))
  taps = hidden @ np.asarray(layer.taps.kernel[...])
  taps = (taps + np.asarray(layer.taps.bias[...])).reshape(2, 9, 4, 16)
  for start, given in ((before, tail), (np.zeros_like(before), None)):
    known = np.concatenate([start, value], axis=1)
    expected = np.zeros(value.shape)
    for b, t, c, w in np.ndindex(2, 9, 16, 4):
      expected[b, t, c] += taps[b, t, w, c] * known[b, t + w, c]
    run = jax.jit(layer.__call__, compiler_options=FAST)
    np.testing.assert_allclose(
      run(X, VALUE, given), silu(expected), rtol=0, atol=1e-5
    )


def test_it_starts_with_the_current_token_alone():
  y = convolution()(X, VALUE, None)
  np.testing.assert_allclose(y, jax.nn.silu(VALUE), atol=1e-6)


@pytest.mark.long
def test_taps_come_from_the_token_and_not_from_its_value():
  layer = convolution(0.5)
  taps = jax.jacobian(lambda v: layer(X, v, None))(VALUE)
  assert taps.shape == (2, 9, 16, 2, 9, 16)
  other = convolution(0.5)(X.at[0, 4].add(1.0), VALUE, None)
  change = jnp.abs(other - layer(X, VALUE, None)).max(-1)
  assert (change[0, 4] > 1e-3) and jnp.sum(change > 0) == 1
  reach = jnp.abs(taps[0, 5, :, 0]).max((0, 2)) > 0
  assert reach.tolist() == [False] * 2 + [True] * 4 + [False] * 3
  own = taps[0, 5, :, 0, 5]  # Each channel separately.
  np.testing.assert_array_equal(own, jnp.diag(jnp.diag(own)))


@pytest.mark.long
def test_it_learns_although_a_matrix_starts_at_zero():
  """W_2 = 0 stops the gradient of W_1 for one step and no longer."""
  graphdef, params = nnx.split(
    jax.jit(lambda: build(12, 2, 4, 8), compiler_options=FAST)()
  )
  weights = jax.random.normal(jax.random.key(4), X.shape)

  @jax.jit
  def slope(params):
    def value(params):
      layer = nnx.merge(graphdef, params)
      return jnp.sum(weights * layer(X, layer.initial_state(2))[0])

    return jax.grad(value)(params)

  first = slope(params)
  second = slope(jax.tree.map(lambda x, g: x - 0.1 * g, params, first))
  dead = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in jax.tree_util.tree_leaves_with_path(first)
    if not jnp.abs(leaf).max() > 0
  ]
  assert [name.split("/")[:3] for name in dead] == [
    ["convolution", "hidden", "kernel"]
  ]
  assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(second))


def test_taps_are_not_kept_for_the_backward_pass():
  """All residuals together have fewer elements than [B, T, W, C]."""
  layer = convolution(0.5)
  _, pull_back = jax.vjp(lambda x, v: layer(x, v, None), X, VALUE)
  kept = sum(x.size for x in jax.tree.leaves(pull_back))
  assert X.size + VALUE.size <= kept < 4 * VALUE.size


@pytest.mark.long
def test_queries_and_keys_pass_no_convolution():
  """Without decay and values, a head holds only one token's key."""
  layer = jax.jit(lambda: build(12, 2, 4, 8), compiler_options=FAST)()
  _, state, _ = layer(X[:, :1], layer.initial_state(2))
  key = np.asarray(X[:, 0] @ layer.key.kernel[...], np.float64)
  key = silu(key).reshape(2, 2, 4)
  key /= np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)
  value = silu(np.asarray(X[:, 0] @ layer.value.kernel[...], np.float64))
  write = np.asarray(X[:, 0] @ layer.fast_weights.write.kernel[...], np.float64)
  written = (1 / (1 + np.exp(-write)))[..., None] * value.reshape(2, 2, 8)
  expected = key[..., :, None] * written[..., None, :]
  np.testing.assert_allclose(state.fast, expected, rtol=1e-4, atol=1e-7)


def test_parameters_by_hand():
  """The sizes of Jet-Nemotron 2B, with 5.3 million for the generator."""
  width, heads, keys, values = 1536, 12, 96, 256
  channels = heads * values
  expected = 2 * width * heads * keys + 3 * width * channels
  generator = width * channels // 8 + channels // 8 * channels * 4
  assert 5.3e6 < generator < 5.31e6
  expected += generator + 4 * channels  # And its bias.
  expected += 2 * width * heads + values + 2 * heads
  params = nnx.state(nnx.eval_shape(lambda: build(width, heads, keys, values)))
  assert sum(x.size for x in jax.tree.leaves(params)) == expected


def test_too_few_values_for_a_generator_are_named():
  with pytest.raises(UserError, match="6 value features over all heads"):
    build(12, 1, 4, 6)
