"""Muon's arithmetic against NumPy and PyTorch, with AdamW, and on meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests_support import ROOT, SMOKE, load_config, stacked, train_batches

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.optim import chain, parameters

# Tiny programs take longer to compile than to run.
compiled = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@compiled
def orthogonalise(x):
  """The direction of a gradient [..., inputs, outputs], without a scale."""
  tx = chain.scale_by_muon(0.0)
  rows, columns = x.shape[-2:]
  return tx.update(x, tx.init(x))[0] / math.sqrt(max(1, columns / rows))


def normal(*shape, seed=0):
  draw = np.random.default_rng(seed).normal(size=shape)
  return draw.astype(np.float32)


def by_svd(x):
  """The result of five steps: the polynomial, value by value."""
  u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
  s = s / (np.sqrt((s**2).sum()) + 1e-7)
  for _ in range(5):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  return (u * s[None]) @ vt


SHAPES = [(16, 16), (12, 40), (40, 12), (1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_singular_value_goes_through_the_polynomial(shape):
  x = normal(*shape)
  np.testing.assert_allclose(orthogonalise(x), by_svd(x), atol=2e-4)


def test_a_stack_is_its_matrices_one_by_one():
  x = normal(2, 3, 6, 10)
  x[1, 2] *= 1e4  # A large matrix does not affect the others.
  got = orthogonalise(x)
  assert got.shape == x.shape and got.dtype == jnp.float32
  for layer in np.ndindex(2, 3):
    np.testing.assert_allclose(got[layer], by_svd(x[layer]), atol=2e-4)


@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("shape", [(6, 10), (3, 10, 6), (2, 3, 6, 10)])
def test_a_mesh_shares_out_matrices(mesh, shape):
  """Counts that devices cannot share equally are padded with zeros."""
  devices = jax.devices()[: math.prod(mesh)]
  x = normal(*shape)
  expected = orthogonalise(x)
  with jax.set_mesh(sharding.make_mesh(sharding.Config(*mesh), devices)):
    got = orthogonalise(x)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def make_params():
  """One parameter of each kind, [layers, inputs, outputs] in the stack."""
  return {
    "layers": {
      "query": {"kernel": normal(2, 6, 10)},
      "norm": {"scale": 1 + normal(2, 6, seed=1)},
      "A_log": normal(2, 3, seed=2),
      "dt_bias": normal(2, 3, seed=3),
    },
    "token_embedding": {"embedding": normal(7, 6, seed=4)},
    "head": {"kernel": normal(6, 7, seed=5)},
  }


SETTINGS = chain.Config(
  name="muon",
  learning_rate=1e-3,
  muon_learning_rate=0.05,
  muon_momentum=0.9,
  schedule="wsd",
  final_learning_rate=1e-4,
  warmup_steps=2,
  cooldown_fraction=0.25,
  b2=0.95,
  weight_decay=0.5,
  decay="matrices",
  clip_norm=0.0,
)
NUM_STEPS = 8


def run(tx, params, num_steps):
  """Parameters after steps with gradients that change from step to step."""

  @compiled
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = compiled(tx.init)(params)
  for at in range(num_steps):
    grads = jax.tree.map(
      lambda x, at=at: normal(*x.shape, seed=10 + at), params
    )
    params, state = step(params, state, grads)
  return jax.device_get(params)


def test_muon_is_the_published_algorithm():
  """Momentum, look-ahead, decay, rates: written out, for every step."""
  got = run(chain.make_optimizer(SETTINGS, NUM_STEPS), make_params(), NUM_STEPS)
  rates = 0.05 * np.array([0, 0.5, 1, 1, 1, 1, 1, 0.55])
  kernel = make_params()["layers"]["query"]["kernel"].astype(np.float64)
  momentum = np.zeros_like(kernel)
  for at, rate in enumerate(rates):
    grad = normal(*kernel.shape, seed=10 + at)
    momentum += 0.1 * (grad - momentum)
    ahead = grad + 0.9 * (momentum - grad)
    step = np.stack([by_svd(x) for x in ahead]) * math.sqrt(10 / 6)
    kernel = kernel * (1 - rate * 0.5) - rate * step
  np.testing.assert_allclose(
    got["layers"]["query"]["kernel"], kernel, atol=1e-4
  )


def test_the_other_half_is_plain_adamw():
  """The same numbers as AdamW alone: no look-ahead, and its own b2."""
  params = make_params()
  adamw = optax.adamw(
    chain.make_schedule(SETTINGS, NUM_STEPS),
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.5,
    mask=lambda params: parameters.decay_mask(params, "matrices"),
  )
  expected = run(adamw, params, NUM_STEPS)
  got = run(chain.make_optimizer(SETTINGS, NUM_STEPS), params, NUM_STEPS)
  kernel = got["layers"].pop("query")["kernel"]
  other = expected["layers"].pop("query")["kernel"]
  assert not np.allclose(kernel, other, atol=1e-3)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8),
    got,
    expected,
  )


def test_without_gradients_only_matrices_decay():
  """Each at its own rate; stacked vectors are not matrices."""
  config = chain.Config(
    name="muon",
    learning_rate=0.1,
    muon_learning_rate=0.2,
    weight_decay=0.5,
    decay="matrices",
    schedule="constant",
    warmup_steps=0,
  )
  tx = chain.make_optimizer(config, NUM_STEPS)
  params = make_params()
  zeros = jax.tree.map(np.zeros_like, params)
  updates, _ = compiled(tx.update)(zeros, compiled(tx.init)(params), params)
  expected = jax.tree.map(np.zeros_like, params)
  kernel = params["layers"]["query"]["kernel"]
  expected["layers"]["query"]["kernel"] = -0.2 * 0.5 * kernel
  expected["head"]["kernel"] = -0.1 * 0.5 * params["head"]["kernel"]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, expected
  )


def test_both_halves_see_clipped_gradients():
  config = chain.Config(
    name="muon", clip_norm=1.0, schedule="constant", warmup_steps=0
  )
  tx = chain.make_optimizer(config, NUM_STEPS)
  params = {
    "query": {"kernel": np.ones((2, 4), np.float32)},
    "head": {"kernel": np.ones((2, 4), np.float32)},
  }
  grads = jax.tree.map(lambda x: 100 * x, params)
  _, state = compiled(tx.update)(grads, compiled(tx.init)(params), params)
  for name, moment, factor in (
    ("query", "trace", 1.0),
    ("head", "mu", 0.1),
  ):
    value = optax.tree.get(state, moment)[name]["kernel"]
    np.testing.assert_allclose(value, factor * 0.25, rtol=1e-5)


def test_pytorch_agrees():
  """Its products are in bfloat16: only to about a hundredth."""
  stored = np.load(ROOT / "tests" / "fixtures" / "torch_muon.npz")
  rate, decay = float(stored["lr"]), float(stored["weight_decay"])
  config = chain.Config(
    name="muon",
    muon_learning_rate=rate,
    muon_momentum=float(stored["momentum"]),
    weight_decay=decay,
    clip_norm=0.0,
    schedule="constant",
    warmup_steps=0,
  )
  start, gradients = stored["start"], stored["gradients"]
  tx = chain.make_optimizer(config, NUM_STEPS)
  params = {"query": {"kernel": start}}
  state, update = compiled(tx.init)(params), compiled(tx.update)
  for gradient in gradients:
    updates, state = update({"query": {"kernel": gradient}}, state, params)
    params = optax.apply_updates(params, updates)
  decayed = start * (1 - rate * decay) ** len(gradients)
  moved = params["query"]["kernel"] - decayed
  expected = stored["end"] - decayed
  error = np.linalg.norm(moved - expected) / np.linalg.norm(expected)
  assert error < 0.015


def train(mesh, num_steps=3):
  """The state after steps with large rates."""
  config = load_config(*SMOKE["looped"])
  sizes = dict(zip(sharding.AXES, mesh, strict=True))
  config_lib.override(
    config,
    {
      **{f"mesh.{axis}": size for axis, size in sizes.items()},
      "mesh.min_split_size": 200,
      "model.mlp": "swiglu",
      "model.num_loops": 1,
      "optim.name": "muon",
      "optim.muon_learning_rate": 0.02,
      "optim.learning_rate": 1e-3,
      "optim.warmup_steps": 0,
    },
  )
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[: math.prod(mesh)])
  batch = stacked(program, train_batches(settings, num_steps))
  return program.train(program.init(jax.random.key(0)), batch, {})[0]


# Minutes on two cores; other tests check its parts.
@pytest.mark.manual
def test_a_mesh_computes_what_one_device_computes(capfd):
  expected, state = train((1, 1, 1)), train((2, 2, 2))
  for got, reference in (
    (state.params, expected.params),
    (state.opt_state, expected.opt_state),
  ):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=5e-5),
      jax.device_get(got),
      jax.device_get(reference),
    )
  # The compiler warns when it gathers arrays that should stay split.
  assert "Involuntary full rematerialization" not in capfd.readouterr().err
  # Each moment has its parameter's sharding.
  momentum = optax.tree.get(state.opt_state, "trace")
  layers = state.params["layers"]
  for name in ("query", "output"):
    kernel = layers["attention"][name]["kernel"]
    mean = momentum["layers"]["attention"][name]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    assert mean.sharding == kernel.sharding
  table = optax.tree.get(state.opt_state, "nu")["token_embedding"]["embedding"]
  assert not table.sharding.is_fully_replicated
