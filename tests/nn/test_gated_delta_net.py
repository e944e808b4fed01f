"""Gated DeltaNet: its parameters, and comparison with Qwen3-Next's layer."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy_layers import in_float64, sigmoid, silu
from tests_support import ROOT

from loopjax.nn.fast_weights.gated_delta import GatedDeltaNet
from loopjax.types import Precision

FAST = {"xla_backend_optimization_level": 0}
WIDTH, KEY_HEADS, HEADS, KEYS, VALUES = 12, 2, 4, 8, 6


def build(*sizes, **options):
  def make():
    return GatedDeltaNet(
      *sizes, precision=Precision(), rngs=nnx.Rngs(params=0), **options
    )

  return make


def count(make):
  params = nnx.state(nnx.eval_shape(make))
  return sum(x.size for x in jax.tree.leaves(params))


def test_parameters_by_hand():
  """Little more than 6 D^2 at the usual sizes: keys 3/4 D, values 3/2 D."""
  width, heads, keys, values = 256, 3, 64, 128
  expected = 2 * width * heads * keys  # Queries and keys.
  expected += 3 * width * heads * values  # Values, gate, output.
  assert expected == 6 * width**2
  expected += 2 * width * heads  # The two gates' logits.
  expected += 4 * heads * (2 * keys + values)  # Taps of 4 tokens.
  expected += values + 2 * heads  # Norm, A_log and dt_bias.
  assert count(build(width, heads, keys, values)) == expected == 397_958
  fewer = 2 * (width + 4) * 2 * keys  # One query and key for three heads.
  one = build(width, heads, keys, values, num_key_heads=1)
  assert count(one) == expected - fewer


def test_every_parameter_gets_a_gradient_from_the_start():
  graphdef, params = nnx.split(
    jax.jit(build(WIDTH, HEADS, KEYS, VALUES), compiler_options=FAST)()
  )
  x, weights = jax.random.normal(jax.random.key(1), (2, 2, 9, WIDTH))

  def value(params):
    layer = nnx.merge(graphdef, params)
    y, _, _ = layer(x, layer.initial_state(2))
    return jnp.sum(weights * y)

  grads = jax.jit(jax.grad(value), compiler_options=FAST)(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.abs(leaf).max() > 0, path


def by_hand(params, x):
  """Equations of `GatedDeltaNet` and `FastWeights`, token by token."""

  def mixed(name, index):
    u, taps = x @ params[name]["kernel"], params["convolutions"][index]["taps"]
    u = np.concatenate([np.zeros((len(u), len(taps) - 1, u.shape[2])), u], 1)
    steps = range(x.shape[1])
    y = [np.sum(taps * u[:, t : t + len(taps)], axis=1) for t in steps]
    return silu(np.stack(y, 1))

  def heads(x, size):
    x = x.reshape(*x.shape[:2], -1, size)
    return np.repeat(x, HEADS // x.shape[2], axis=2)

  def unit(x):
    return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)

  query, key, value = (
    heads(mixed(name, index), size)
    for index, (name, size) in enumerate(
      (("query", KEYS), ("key", KEYS), ("value", VALUES))
    )
  )
  query, key = unit(query) / np.sqrt(KEYS), unit(key)
  own = params["fast_weights"]
  rates = np.log1p(np.exp(x @ own["decay"]["kernel"] + own["dt_bias"]))
  decay = np.exp(-np.exp(own["A_log"]) * rates)
  write = sigmoid(x @ own["write"]["kernel"])
  fast, reads = np.zeros((len(x), HEADS, KEYS, VALUES)), []
  for t in range(x.shape[1]):
    fast = decay[:, t, :, None, None] * fast
    error = value[:, t] - np.einsum("bhkv,bhk->bhv", fast, key[:, t])
    error = write[:, t, :, None] * error
    fast = fast + key[:, t, :, :, None] * error[:, :, None]
    reads.append(np.einsum("bhkv,bhk->bhv", fast, query[:, t]))
  read = np.stack(reads, 1)
  read = read / np.sqrt(np.mean(read**2, -1, keepdims=True) + 1e-5)
  read = (read * own["norm"]["scale"]).reshape(*x.shape[:2], -1)
  y = (read * silu(x @ own["gate"]["kernel"])) @ own["output"]["kernel"]
  return y, fast


def test_the_layer_by_hand():
  make = build(WIDTH, HEADS, KEYS, VALUES, num_key_heads=KEY_HEADS)
  graphdef, state = nnx.split(jax.jit(make, compiler_options=FAST)())
  random = np.random.default_rng(0)
  state = jax.tree.map(  # All scales differ, and no gate is 0.5.
    lambda x: x + 0.3 * random.normal(size=x.shape).astype(np.float32), state
  )
  x = random.normal(size=(2, 7, WIDTH)).astype(np.float32)

  def run(state, x):
    layer = nnx.merge(graphdef, state)
    y, after, _ = layer(x, layer.initial_state(len(x)))
    return y, after.fast

  got = jax.jit(run, compiler_options=FAST)(state, x)
  wide = in_float64(state)
  expected = by_hand(nnx.to_pure_dict(wide), x.astype(np.float64))
  for ours, theirs in zip(got, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def nested(flat):
  """{"a/b": x} -> {"a": {"b": x}}, the parameters' form; 0, 1 are integers."""
  tree = {}
  for path, value in flat.items():
    *outer, last = (int(x) if x.isdigit() else x for x in path.split("/"))
    place = tree
    for name in outer:
      place = place.setdefault(name, {})
    place[last] = value
  return tree


def test_values_and_gradients_are_those_of_qwen3_next():
  """Its layer in torch, from fixtures/make_oracles.py."""
  stored = np.load(ROOT / "tests" / "fixtures" / "qwen3_next_layer.npz")
  x, weights = stored["x"], stored["weights"]

  def named(kind):
    start = f"{kind}/"
    names = [name for name in stored.files if name.startswith(start)]
    return {name.removeprefix(start): stored[name] for name in names}

  make = build(WIDTH, HEADS, KEYS, VALUES, num_key_heads=KEY_HEADS)
  graphdef, state = nnx.split(jax.jit(make, compiler_options=FAST)())
  params = nested(named("parameter"))
  shapes = jax.tree.map(np.shape, nnx.to_pure_dict(state))
  assert jax.tree.map(np.shape, params) == shapes

  def value(params, x):
    layer = nnx.merge(graphdef, params)
    y, _, _ = layer(x, layer.initial_state(len(x)))
    return jnp.sum(weights * y), y

  run = jax.jit(jax.grad(value, (0, 1), has_aux=True), compiler_options=FAST)
  (grads, d_x), y = run(params, x)
  wanted = named("gradient")
  assert_close(y, stored["y"])
  assert_close(d_x, wanted.pop("x"))
  assert len(wanted) == len(jax.tree.leaves(grads)) == 13
  jax.tree.map(assert_close, grads, nested(wanted))


def assert_close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=5e-5 * np.abs(want).max())
