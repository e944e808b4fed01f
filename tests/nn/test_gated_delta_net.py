"""Gated DeltaNet: its parameters, and Qwen3-Next's layer in torch beside it."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.nn.gated_delta import GatedDeltaNet
from loopjax.types import Precision

FAST = {"xla_backend_optimization_level": 0}
WIDTH, KEY_HEADS, HEADS, KEYS, VALUES = 12, 2, 4, 8, 6
GROUP = HEADS // KEY_HEADS


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
  """Six D^2 and little more at the usual sizes, 3/4 D keys of half a value."""
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

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  def silu(x):
    return x * sigmoid(x)

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
  state = jax.tree.map(  # No two scales are equal, and no gate is half open.
    lambda x: x + 0.3 * random.normal(size=x.shape).astype(np.float32), state
  )
  x = random.normal(size=(2, 7, WIDTH)).astype(np.float32)

  def run(state, x):
    layer = nnx.merge(graphdef, state)
    y, after, _ = layer(x, layer.initial_state(len(x)))
    return y, after.fast

  got = jax.jit(run, compiler_options=FAST)(state, x)
  wide = jax.tree.map(lambda x: np.asarray(x, np.float64), state)
  expected = by_hand(nnx.to_pure_dict(wide), x.astype(np.float64))
  for ours, theirs in zip(got, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def fuse(*parts):
  """Rows [H c, D] of several matrices -> those of each key head together."""
  rows = [x.reshape(KEY_HEADS, -1, WIDTH) for x in parts]
  return np.concatenate(rows, axis=1).reshape(-1, WIDTH)


def split(fused, *sizes):
  """Undoes `fuse`: rows per key head of each."""
  edges = np.cumsum(sizes)[:-1]
  parts = np.split(fused.reshape(KEY_HEADS, -1, WIDTH), edges, axis=1)
  return [x.reshape(-1, WIDTH).T for x in parts]


def qwen():
  """Its layer, in torch and with the functions that need no kernels."""
  torch = pytest.importorskip("torch")
  package = "transformers.models.qwen3_next"
  model = pytest.importorskip(f"{package}.modeling_qwen3_next")
  config = pytest.importorskip(f"{package}.configuration_qwen3_next")
  if importlib.util.find_spec("fla"):
    pytest.skip("its kernels, which need a GPU, take the layer's place")
  sizes = config.Qwen3NextConfig(
    hidden_size=WIDTH,
    num_hidden_layers=1,
    linear_num_key_heads=KEY_HEADS,
    linear_num_value_heads=HEADS,
    linear_key_head_dim=KEYS,
    linear_value_head_dim=VALUES,
    rms_norm_eps=1e-5,
  )
  return torch, model.Qwen3NextGatedDeltaNet(sizes, 0)


def test_values_and_gradients_are_those_of_qwen3_next():
  torch, theirs = qwen()
  make = build(WIDTH, HEADS, KEYS, VALUES, num_key_heads=KEY_HEADS)
  graphdef, state = nnx.split(jax.jit(make, compiler_options=FAST)())
  random = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: np.asarray(x + 0.3 * random.normal(size=x.shape), np.float32),
    nnx.to_pure_dict(state),
  )
  x, weights = random.normal(size=(2, 2, 70, WIDTH)).astype(np.float32)
  fast_weights, taps = params["fast_weights"], params["convolutions"]
  matrix = {
    name: tree["kernel"].T
    for name, tree in (params | fast_weights).items()
    if "kernel" in tree
  }
  mixed = [taps[i]["taps"] for i in range(3)]
  weight = {
    "in_proj_qkvz.weight": fuse(
      *(matrix[name] for name in ("query", "key", "value", "gate"))
    ),
    "in_proj_ba.weight": fuse(matrix["write"], matrix["decay"]),
    "conv1d.weight": np.concatenate(mixed, axis=1).T[:, None],
    "A_log": fast_weights["A_log"],
    "dt_bias": fast_weights["dt_bias"],
    "norm.weight": fast_weights["norm"]["scale"],
    "out_proj.weight": matrix["output"],
  }
  theirs.load_state_dict({k: torch.tensor(v) for k, v in weight.items()})
  given = torch.tensor(x, requires_grad=True)
  wanted = theirs(given)
  (torch.tensor(weights) * wanted).sum().backward()

  def value(params, x):
    layer = nnx.merge(graphdef, params)
    y, _, _ = layer(x, layer.initial_state(len(x)))
    return jnp.sum(weights * y), y

  run = jax.jit(jax.grad(value, (0, 1), has_aux=True), compiler_options=FAST)
  flat = jax.tree.leaves(params)
  state = jax.tree.unflatten(jax.tree.structure(state), flat)
  (grads, d_x), y = run(state, x)
  grads = nnx.to_pure_dict(grads)

  def assert_close(got, want):
    want = np.asarray(want)
    np.testing.assert_allclose(
      got, want, rtol=0, atol=5e-5 * np.abs(want).max()
    )

  slope = {k: v.grad.numpy() for k, v in theirs.named_parameters()}
  assert_close(y, wanted.detach())
  assert_close(d_x, given.grad)
  fused = split(slope["in_proj_qkvz.weight"], KEYS, KEYS, *[GROUP * VALUES] * 2)
  for tree, name, want in zip(
    (grads, grads, grads, grads["fast_weights"]),
    ("query", "key", "value", "gate"),
    fused,
    strict=True,
  ):
    assert_close(tree[name]["kernel"], want)
  write, decay = split(slope["in_proj_ba.weight"], GROUP, GROUP)
  assert_close(grads["fast_weights"]["write"]["kernel"], write)
  assert_close(grads["fast_weights"]["decay"]["kernel"], decay)
  assert_close(
    np.concatenate([grads["convolutions"][i]["taps"] for i in range(3)], 1),
    slope["conv1d.weight"][:, 0].T,
  )
  assert_close(
    grads["fast_weights"]["output"]["kernel"], slope["out_proj.weight"].T
  )
  assert_close(grads["fast_weights"]["norm"]["scale"], slope["norm.weight"])
  for name in ("A_log", "dt_bias"):
    assert_close(grads["fast_weights"][name], slope[name])
