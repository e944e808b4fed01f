"""Training with Muon: meshes, state, checkpoints."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests_support import SMOKE, load_config, make_datasets

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import pipeline
from loopjax.run.checkpoints import checkpoint, restore

# Minutes on two cores; other tests check its parts.
pytestmark = pytest.mark.manual


def train(mesh, num_steps=3):
  """The program, its state after steps with large rates, and its settings."""
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
  batches = pipeline.iterate(
    make_datasets(settings)["train"].batches, num_threads=0
  )
  rows = [next(batches) for _ in range(num_steps)]
  batch = sharding.put_batch(
    program.mesh,
    jax.tree.map(lambda *parts: np.stack(parts), *rows),
    settings.run.batch_size,
    stacked=True,
  )
  state, _ = program.train(program.init(jax.random.key(0)), batch, {})
  return program, state


@pytest.fixture(scope="module")
def one_device():
  """Program and state after three steps on one device."""
  return train((1, 1, 1))


def test_a_mesh_computes_what_one_device_computes(one_device, capfd):
  expected = one_device[1]
  _, state = train((2, 2, 2))
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
  momentum = optax.tree.get(state.opt_state, "momentum")
  layers = state.params["layers"]
  for name in ("query", "output"):
    kernel = layers["attention"][name]["kernel"]
    mean = momentum["layers"]["attention"][name]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    assert mean.sharding == kernel.sharding
  table = optax.tree.get(state.opt_state, "nu")["token_embedding"]["embedding"]
  assert not table.sharding.is_fully_replicated


def test_muon_moves_the_body_and_keeps_one_moment_of_it(one_device):
  program, state = one_device
  start = program.init(jax.random.key(0)).params["layers"]["mlp"]
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).mean(), state.params["layers"]["mlp"], start
  )
  # Three steps of 0.02 with singular values near one.
  assert all(0.002 < step < 0.03 for step in jax.tree.leaves(moved)), moved
  assert len(jax.tree.leaves(optax.tree.get(state.opt_state, "momentum"))) == 7
  assert len(jax.tree.leaves(optax.tree.get(state.opt_state, "nu"))) == 4


def test_a_checkpoint_brings_both_halves_back(one_device, tmp_path):
  program, state = one_device
  checkpoints = checkpoint.Checkpoints(tmp_path)
  try:
    checkpoints.save(3, state, {})
  finally:
    checkpoints.close()
  restored, _ = restore.state(tmp_path, 3, program.abstract_state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  same = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), restored, state)
  assert all(jax.tree.leaves(same))
