"""TRM against its pseudo-code in PyTorch, and its identities."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from tests_support import ROOT, strict_dtypes

from loopjax.errors import UserError
from loopjax.models import supervised, trm
from loopjax.types import TaskSpec

FIXTURES = ROOT / "tests" / "fixtures"
SPEC = TaskSpec(7, 6, tuple((i,) for i in range(6)))
SMALL = trm.Config(
  width=8, num_heads=2, mlp_ratio=1.5, num_loops=3, num_cycles=3,
  num_latent_steps=2, num_memory_tokens=3, exploration=0.0,
  precision="float32",
)  # fmt: skip
CONFIGS = {
  "attention": SMALL,
  "mlp": dataclasses.replace(
    SMALL, mixer="mlp", num_heads=8, token_mlp_width=5
  ),
}
MIXERS = sorted(CONFIGS)


def stored(mixer):
  """What PyTorch computed, by name."""
  return dict(np.load(FIXTURES / f"trm_{mixer}.npz"))


def params_of(mixer):
  """The parameters of the fixture, in our tree."""
  found = stored(mixer)
  tree = examples.params_of(trm, CONFIGS[mixer], SPEC)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jnp.asarray(found[f"parameter/{_name(path)}"]), tree
  )


def _name(path):
  return jax.tree_util.keystr(path, simple=True, separator="/")


@functools.cache
def step_of(config):
  """One segment: (loss, metrics), gradients, of parameters and a batch."""

  @strict_dtypes()
  def run(params, batch, key):
    model = examples.merged(trm, config, SPEC, params)
    return trm.loss(model, batch, key, jnp.zeros((), jnp.int32), None)

  grad = jax.value_and_grad(run, has_aux=True)
  return jax.jit(grad, compiler_options=examples.FAST)


def train(config, params, data, num_steps, key=jax.random.key(0)):
  """[(loss, metrics, gradients)] of segments, state carried between them."""
  carried, found = trm.init_carried(config, SPEC, data["inputs"].shape[1]), []
  for step in range(num_steps):
    batch = {name: data[name][step] for name in supervised.ENTRIES}
    run = step_of(config)
    (total, metrics), grads = run(params, {**batch, "carried": carried}, key)
    carried = metrics["carried"]
    found.append((total, metrics, grads))
  return found


def data(num_steps=1, rows=2, seed=0):
  random = np.random.default_rng(seed)
  shape = (num_steps, rows, SPEC.sequence_length)
  return {
    "inputs": random.integers(0, SPEC.vocab_size, shape).astype(np.int32),
    "targets": random.integers(0, SPEC.vocab_size, shape).astype(np.int32),
    "weights": np.ones(shape, np.float32),
  }


@pytest.mark.parametrize("mixer", MIXERS)
def test_two_segments_are_those_of_the_pseudo_code(mixer):
  """Losses, gradients and who halts; the second goes on, or takes the next."""
  expected, config = stored(mixer), CONFIGS[mixer]
  np.testing.assert_allclose(
    expected["start"], [y[0, 0] for y in supervised.start(2, (1, 1, 8))]
  )
  found = train(config, params_of(mixer), expected, 2)
  for step, (total, metrics, grads) in enumerate(found):
    rows = metrics["carried"].by_example
    np.testing.assert_allclose(total, expected[f"{step}/loss"], rtol=1e-5)
    np.testing.assert_array_equal(rows.halted, expected[f"{step}/halted"])
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
      wanted = expected[f"{step}/gradient/{_name(path)}"]
      np.testing.assert_allclose(
        grad, wanted, atol=2e-5, rtol=1e-4, err_msg=_name(path)
      )
  halted = expected["0/halted"]
  assert 0 < halted.sum() < len(halted)
  np.testing.assert_array_equal(rows.steps, 2 - halted)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_forward_pass_is_segments_in_a_row(mixer):
  expected = stored(mixer)
  inputs = expected["inputs"][0]
  params = params_of(mixer)
  output = examples.run(
    trm, CONFIGS[mixer], SPEC, inputs, params, num_loops=2, trace=("halting",)
  )
  one = examples.run(trm, CONFIGS[mixer], SPEC, inputs, params, num_loops=1)
  np.testing.assert_allclose(one.logits, expected["0/logits"], atol=2e-5)
  on = ~expected["0/halted"]  # Those that PyTorch kept for a second segment.
  np.testing.assert_allclose(
    output.logits[on], expected["1/logits"][on], atol=2e-5
  )
  halting = output.trace["halting"]
  np.testing.assert_allclose(halting[0], expected["0/halting"][:, 0], atol=2e-5)
  wanted = np.where(halting[0] > 0, 1, 2)
  np.testing.assert_array_equal(output.stats["halt_steps"], wanted)


def test_pytorch_still_says_so():
  """The fixtures are what their script makes."""
  pytest.importorskip("torch")
  sys.path.append(str(FIXTURES))
  import make_peers

  for mixer in MIXERS:
    expected, made = stored(mixer), make_peers.segments(f"trm_{mixer}")
    assert expected.keys() == {*made, "made_with"}
    for name, value in made.items():
      np.testing.assert_allclose(expected[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "parameters"),
  [
    ({}, 6_828_034),
    (
      {"mixer": "mlp", "token_mlp_width": 512},
      5_028_866,
    ),
  ],
)
def test_parameters_of_the_paper(changes, parameters):
  """The puzzle vector is not among those that the paper counts."""
  spec = TaskSpec(11, 81, tuple((i,) for i in range(81)))
  config = trm.Config(**changes)
  assert examples.count(trm, config, spec) == parameters + config.width


def test_a_row_without_its_own_segments_left_takes_the_next_example():
  """After N_sup segments, whatever its head says; and no row before."""
  params = examples.params_of(trm, SMALL, SPEC)  # The head says never.
  batches = data(num_steps=5)
  found = train(SMALL, params, batches, 5)
  rows = [metrics["carried"].by_example for _, metrics, _ in found]
  assert [int(r.steps[0]) for r in rows] == [1, 2, 3, 1, 2]
  assert [bool(r.halted[0]) for r in rows] == [False, False, True, False, False]
  for step, r in enumerate(rows):
    for name in supervised.ENTRIES:
      taken = batches[name][3 * (step // 3)]
      np.testing.assert_array_equal(r.example[name], taken)
  # The fourth segment begins where the first did, with another example.
  first, fourth = (
    train(SMALL, params, {k: v[i:] for k, v in batches.items()}, 1)[0][0]
    for i in (0, 3)
  )
  np.testing.assert_allclose(found[0][0], first, rtol=1e-6)
  np.testing.assert_allclose(found[3][0], fourth, rtol=1e-6)


def test_memory_is_only_seen_through_attention():
  """Without it the cells alone are left; its inputs are zeros but the first."""
  params = examples.params_of(trm, SMALL, SPEC)
  model = examples.merged(trm, SMALL, SPEC, params)
  model.ends.puzzle_vector[...] = jnp.ones(8)
  x = model.ends.embed(jnp.zeros((1, 6), jnp.int32))[0]
  assert jnp.array_equal(x[0], jnp.full(8, 8**0.5))
  assert not x[1:3].any() and x[3:].any()
  bare = dataclasses.replace(SMALL, num_memory_tokens=0)
  assert examples.count(trm, bare, SPEC) == examples.count(trm, SMALL, SPEC) - 8
  output = examples.run(trm, bare, SPEC, jnp.zeros((1, 6), jnp.int32))
  assert jnp.isfinite(output.logits).all()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixer": "convolution"}, "mixer='convolution'"),
    ({"token_mlp_width": 64}, "token_mlp_width has no effect while"),
    ({"mixer": "mlp", "num_heads": 4}, "num_heads has no effect while"),
    ({"mixer": "mlp", "positions": "grid"}, "positions has no effect while"),
    ({"num_loops": 0}, "num_loops=0"),
    ({"num_cycles": 0}, "num_cycles=0"),
    ({"exploration": 1.5}, "exploration=1.5"),
    ({"width": 36}, "model.width=36"),
  ],
)
def test_impossible_models_are_named(changes, message):
  with pytest.raises(UserError, match=message) as caught:
    trm.Config(**changes)
  assert "\n" not in str(caught.value)
