"""TRM, HRM and URM against their pseudo-code in PyTorch."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import numpy_layers
import pytest
from in_float64 import without_rounding
from tests_support import ROOT, crossing, long_case, strict_dtypes

from loopjax.loop import supervision
from loopjax.models import MODELS, supervised
from loopjax.nn import block
from loopjax.types import TaskSpec

FIXTURES = ROOT / "tests" / "fixtures"
SPEC = TaskSpec(7, 6, tuple((i,) for i in range(6)))
SIZES = {
  "width": 8, "num_heads": 2, "num_layers": 2, "mlp_ratio": 1.5,
  "num_loops": 3, "num_cycles": 3, "num_memory_tokens": 3, "exploration": 0.0,
  "precision": "float32",
}  # fmt: skip
# By fixture name; the first part is the family's.
CONFIGS = {
  "trm_attention": {"num_latent_steps": 2},
  "trm_mlp": {
    "num_latent_steps": 2, "mixer": "mlp", "num_heads": 8, "token_mlp_width": 5,
  },
  "hrm": {"num_low_steps": 2},
  "urm": {"num_inner_steps": 2},
}  # fmt: skip
NAMES = list(CONFIGS)
PUBLISHED = {  # Parameters without the puzzle vector; HRM's and URM's too.
  "trm_attention": 6_828_034,
  "trm_mlp": 5_028_866,
  "hrm": 27_275_266,
  "urm": 13_662_210,
}


def model_of(name, **changes):
  """(family, config)."""
  family = MODELS[name.partition("_")[0]]
  return family, family.Config(**{**SIZES, **CONFIGS[name], **changes})


@functools.cache
def stored(name):
  """PyTorch's results by name."""
  return dict(np.load(FIXTURES / f"{name}.npz"))


def params_of(name):
  """The parameters of the fixture, in our tree."""
  family, config = model_of(name)
  tree = examples.params_of(family, config, SPEC)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jnp.asarray(stored(name)[f"parameter/{_name(path)}"]), tree
  )


def _name(path):
  return jax.tree_util.keystr(path, simple=True, separator="/")


@functools.cache
def step_of(family, config):
  """One segment: (loss, metrics), gradients, of parameters and a batch.

  In float64 like the fixtures, from their initial state: cycles amplify another
  processor's rounding.
  """

  @strict_dtypes()
  def run(params, batch, key, start):
    def stored(num_states, sizes):
      assert len(start) == num_states
      return tuple(jnp.broadcast_to(x, sizes) for x in start)

    model = examples.merged(family, config, SPEC, params)
    with mock.patch.object(supervised, "start", stored):
      return family.loss(model, batch, key, jnp.zeros((), jnp.int32), None)

  return without_rounding(jax.value_and_grad(run, has_aux=True))


def train(model, params, data, num_steps):
  """[(loss, metrics, gradients)] of segments, state carried between them."""
  family, config = model
  rows, found = data["inputs"].shape[1], []
  carried = family.init_carried(config, SPEC, rows)
  start = supervised.start(len(config.state_names), (1, 1, config.width))
  start = data.get("start", np.stack([y[0, 0] for y in start]))
  for step in range(num_steps):
    batch = {name: data[name][step] for name in supervision.ENTRIES}
    (total, metrics), grads = step_of(family, config)(
      params, {**batch, "carried": carried}, jax.random.key(0), start
    )
    carried = metrics["carried"]
    found.append((total, metrics, grads))
  return found


def data(num_steps=1, rows=2):
  random = np.random.default_rng(0)
  shape = (num_steps, rows, SPEC.sequence_length)
  inputs, targets = random.integers(0, SPEC.vocab_size, (2, *shape))
  weights = np.ones(shape, np.float32)
  return {
    "inputs": inputs.astype(np.int32),
    "targets": targets.astype(np.int32),
    "weights": weights,
  }


# TRM with attention is the other one, but for its layers.
@pytest.mark.parametrize(
  "name", [long_case(x) if x == "trm_attention" else x for x in NAMES]
)
def test_two_segments_are_those_of_the_pseudo_code(name):
  """Losses, gradients and halting; the second segment continues or restarts."""
  expected = stored(name)
  start = supervised.start(len(expected["start"]), (1, 1, 8))
  np.testing.assert_allclose(
    expected["start"], [y[0, 0] for y in start], rtol=1e-5
  )
  found = train(model_of(name), params_of(name), expected, 2)
  for step, (total, metrics, grads) in enumerate(found):
    rows = metrics["carried"].by_example
    np.testing.assert_allclose(total, expected[f"{step}/loss"], rtol=1e-8)
    np.testing.assert_array_equal(rows.halted, expected[f"{step}/halted"])
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
      wanted = expected[f"{step}/gradient/{_name(path)}"]
      np.testing.assert_allclose(
        grad, wanted, atol=1e-8, rtol=1e-8, err_msg=_name(path)
      )
  halted = expected["0/halted"]
  assert 0 < halted.sum() < len(halted)
  np.testing.assert_array_equal(rows.steps, 2 - halted)


def test_a_row_is_right_if_all_that_counts_is():
  """The halting head's targets; cells without weight do not count."""
  model, params = model_of("trm_attention"), params_of("trm_attention")
  batch = {name: x[0] for name, x in data(rows=3).items()}
  output = examples.run(
    *model, SPEC, batch["inputs"], params, num_loops=1, trace=("margin",)
  )
  batch["targets"] = np.array(np.argmax(output.logits, axis=-1), np.int32)
  batch["targets"][1:, 2] = (batch["targets"][1:, 2] + 1) % SPEC.vocab_size
  batch["weights"][:2, 2] = 0.0  # Only the last row has weighted errors.
  whole = {name: x[None] for name, x in batch.items()}
  _, metrics, _ = train(model, params, whole, 1)[0]
  np.testing.assert_allclose(metrics["right"], 2 / 3, rtol=1e-6)
  sign = np.array([1, 1, -1]) * np.asarray(output.trace["margin"][0])
  expected = np.mean(np.log1p(np.exp(-sign.astype(np.float64))))
  np.testing.assert_allclose(metrics["halt_loss"], expected, atol=1e-4)


def stablemax_of(logits):
  """The distribution in training, by its definition."""
  s = np.where(logits < 0, 1 / (1 - np.minimum(logits, 0)), logits + 1)
  return s / s.sum(axis=-1, keepdims=True)


def stablemax(output):
  """The distribution in evaluations and figures."""
  powers = np.exp(output.logits)
  return powers / powers.sum(axis=-1, keepdims=True)


@crossing("name", NAMES)
def test_a_forward_pass_is_segments_in_a_row(name):
  expected, (family, config) = stored(name), model_of(name)
  call = family, config, SPEC, expected["inputs"][0], params_of(name)
  names = ("margin", "confidence")
  output = examples.run(*call, num_loops=2, trace=names, exact=True)
  one = examples.run(*call, num_loops=1, exact=True)
  on = ~expected["0/halted"]  # Rows that PyTorch kept for a second segment.
  first, second = expected["0/logits"], expected["1/logits"][on]
  # The fixtures have the float32 values of the state, drawn here in float64.
  np.testing.assert_allclose(stablemax(one), stablemax_of(first), atol=1e-4)
  np.testing.assert_allclose(
    stablemax(output)[on], stablemax_of(second), atol=1e-4
  )
  np.testing.assert_allclose(
    output.trace["confidence"][1][on],
    stablemax_of(second).max(axis=-1),
    atol=1e-4,
  )
  margin, q = output.trace["margin"], expected["0/halting"]
  wants = q[:, 0] - q[:, 1] if name == "hrm" else q[:, 0]
  np.testing.assert_allclose(margin[0], wants, atol=1e-4)
  steps = np.where(margin[0] > 0, 1, 2)
  np.testing.assert_array_equal(output.stats["halt_steps"], steps)


def rooted(x, axis=-1):
  """x of unit mean square, as after each branch of the block."""
  return x / np.sqrt(np.mean(x**2, axis=axis, keepdims=True) + 1e-5)


def network_of(layers):
  """TRM's network in NumPy: post-norm attention and MLP, of a row [S, D]."""

  def turned(x):
    return [numpy_layers.rotated(x[t], t, 10_000.0) for t in range(len(x))]

  def mixed(h, params):
    query, key, value = (
      (h @ params[name]["kernel"]).reshape(len(h), 2, -1)
      for name in ("query", "key", "value")
    )
    rows = [*zip(turned(key), value, strict=True)]
    found = [numpy_layers.attended(q, rows) for q in turned(query)]
    return np.reshape(found, h.shape) @ params["output"]["kernel"]

  def network(h):
    for layer in layers:
      h = rooted(h + mixed(h, layer["mixer"]))
      h = rooted(h + numpy_layers.swiglu(h, layer["mlp"]))
    return h

  return network


@pytest.mark.parametrize("start", ["normal", long_case("fixed")])
def test_an_equilibrium_reasoner_is_its_formulas(start):
  """Random start, damping and noise on the path, of a training step of TRM."""
  family, config = model_of(
    "trm_attention", start=start, damping=0.3, path_noise=0.2
  )
  params = params_of("trm_attention")
  batch = {name: x[0] for name, x in data().items()}
  carried = family.init_carried(config, SPEC, 2)

  @without_rounding
  def loss(params, batch, carried):
    model = examples.merged(family, config, SPEC, params)
    batch = {**batch, "carried": carried}
    step = jnp.zeros((), jnp.int32)
    total, metrics = family.loss(model, batch, jax.random.key(3), step, None)
    return total, metrics["carried"].by_example.state

  total, states = loss(params, batch, carried)
  plain = numpy_layers.in_float64(params)
  ends, layers = plain["ends"], plain["layers"]
  network = network_of([layers[name] for name in sorted(layers)])
  expected = []
  constant = without_rounding(lambda: supervised.start(2, (1, 9, 8)))
  normal = without_rounding(lambda key: jax.random.normal(key, (9, 8)))
  drawn = without_rounding(
    lambda key: jax.random.truncated_normal(key, -2, 2, (2, 9, 8))
  )
  for row in range(2):
    key = jax.random.fold_in(jax.random.key(3), row)
    begin, path = (jax.random.fold_in(key, i) for i in (1, 2))
    table = ends["token_embedding"]["embedding"]
    x = np.zeros((3 + 6, 8))
    x[0], x[3:] = ends["puzzle_vector"], table[batch["inputs"][row]]
    x *= 8**0.5
    if start == "normal":
      y, z = drawn(begin) / 0.87962566
    else:
      y, z = (v[0] for v in constant())
    for _ in range(config.num_cycles):
      for step in range(config.num_latent_steps + 1):
        path, now = jax.random.split(path)
        noise = 0.2 * normal(now)
        if step < config.num_latent_steps:
          z = 0.3 * z + 0.7 * network(z + y + x) + noise
        else:
          y = 0.3 * y + 0.7 * network(y + z) + noise
    np.testing.assert_allclose(states[0][row], y, atol=1e-6)
    np.testing.assert_allclose(states[1][row], z, atol=1e-6)
    chances = stablemax_of(y[3:] @ ends["head"]["kernel"])
    targets = batch["targets"][row]
    loss_of_row = -np.mean(np.log(chances[np.arange(6), targets]))
    q = (y[0] @ ends["halt_head"]["kernel"] + ends["halt_head"]["bias"])[0]
    sign = 1 if (chances.argmax(-1) == targets).all() else -1
    expected.append(loss_of_row + 0.5 * np.log1p(np.exp(-sign * q)))
  np.testing.assert_allclose(total, np.mean(expected), rtol=1e-6)


@crossing("name", NAMES)
def test_random_states_are_those_of_the_example(name):
  """In evaluation: alone or in a batch; others in another start."""
  family, config = model_of(name, start="normal")
  call = family, config, SPEC
  inputs = data(rows=3)["inputs"][0]
  whole = examples.run(*call, inputs, exact=True).logits
  alone = examples.run(*call, inputs[1:2], exact=True).logits
  np.testing.assert_allclose(whole[1:2], alone, atol=1e-8)
  keys = jax.random.split(jax.random.key(5), 3)
  other = examples.run(*call, inputs, keys=keys, exact=True).logits
  assert np.abs(other - whole).max() > 1e-3


def test_pytorch_still_says_so():
  """The fixtures equal their script's output."""
  pytest.importorskip("torch")
  sys.path.append(str(FIXTURES))
  import make_peers

  assert set(make_peers.PEERS) == set(NAMES)
  for name in NAMES:
    expected, made = stored(name), make_peers.segments(name)
    assert expected.keys() == {*made, "made_with"}
    for key, value in made.items():
      np.testing.assert_allclose(expected[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_of_parameters(name):
  """The puzzle vector is a buffer in the authors' code, and not counted."""
  spec = TaskSpec(11, 81, tuple((i,) for i in range(81)))
  family = MODELS[name.partition("_")[0]]
  config = family.Config(**({"mixer": "mlp"} if name == "trm_mlp" else {}))
  count = examples.count(family, config, spec)
  assert count == PUBLISHED[name] + config.width


@pytest.mark.long
def test_a_row_without_segments_left_takes_the_next_example():
  """After N_sup segments, whatever its head says; and no row earlier."""
  model = model_of("trm_attention")
  params = examples.params_of(*model, SPEC)  # The head says never.
  batches = data(num_steps=5)
  found = train(model, params, batches, 5)
  rows = [metrics["carried"].by_example for _, metrics, _ in found]
  assert [int(r.steps[0]) for r in rows] == [1, 2, 3, 1, 2]
  assert [bool(r.halted[0]) for r in rows] == [False, False, True, False, False]
  for step, r in enumerate(rows):
    for name in supervision.ENTRIES:
      taken = batches[name][3 * (step // 3)]
      np.testing.assert_array_equal(r.example[name], taken)
  # The fourth segment begins as the first did, with another example.
  for step in (0, 3):
    rest = {name: value[step:] for name, value in batches.items()}
    alone = train(model, params, rest, 1)[0][0]
    np.testing.assert_allclose(found[step][0], alone, rtol=1e-6)


@pytest.mark.long
def test_memory_has_no_input_but_the_puzzle_vector():
  family, config = model_of("trm_attention")
  model = examples.merged(family, config, SPEC)
  model.ends.puzzle_vector[...] = jnp.ones(8)
  x = model.ends.embed(jnp.zeros((1, 6), jnp.int32))[0]
  np.testing.assert_allclose(x[0], np.full(8, 8**0.5), rtol=1e-6)
  assert not x[1:3].any()
  assert x[3:].any()
  bare = model_of("trm_attention", num_memory_tokens=0)
  count = examples.count(family, config, SPEC)
  assert examples.count(*bare, SPEC) == count - 8
  output = examples.run(*bare, SPEC, jnp.zeros((1, 6), jnp.int32))
  assert output.logits.shape == (1, 6, 7)


@pytest.mark.parametrize(("name", "passes", "last", "segments"), [
  ("trm_attention", 3 * (2 + 1), 2 + 1, 1), ("hrm", 3 * (2 + 1), 2, 2),
  ("urm", 3 * 2, 2, 1),
])  # fmt: skip
def test_a_segment_costs_as_many_passes_of_all_layers(
  name, passes, last, segments
):
  """Of 9 tokens, the last passes with gradients; HRM trains on two segments."""
  family, config = model_of(name)
  found, shape = family.costs(config, SPEC, 3), config.block_shape()
  layers = 2 * block.flops(shape, 9)
  if name == "urm":  # Convolutions of two tokens.
    layers += 2 * 2 * 2 * shape.mlp_width * 9
  head = 2 * 6 * 8 * 7
  expected = [head + n * passes * layers for n in (1, 2, 3)]
  assert found["flops_per_example"] == expected
  training = 3 * head + (segments * passes + 2 * last) * layers
  assert found["training_flops_per_example"] == training
