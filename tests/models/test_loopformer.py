"""LoopFormer: conditioning, trajectories and their loss."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from in_float64 import without_rounding
from numpy_layers import (
  attention,
  gelu_mlp,
  in_float64,
  layer_of,
  rms_normed,
  silu,
)

from loopjax.models import loopformer
from loopjax.types import TaskSpec

PADDING = 2
SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), PADDING)
SMALL = loopformer.Config(
  width=16, num_heads=2, num_layers=2, num_loops=4, init_std=0.2
)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
TARGETS = jnp.roll(TOKENS, -1, axis=1)
WEIGHTS = jnp.asarray(np.arange(24).reshape(3, 8) % 5 > 0, jnp.float32)
BATCH = {"inputs": TOKENS, "targets": TARGETS, "weights": WEIGHTS}
KEY = jax.random.key(3)


def varied(config=SMALL):
  """Parameters that are all random, to detect any omission."""
  params, treedef = jax.tree.flatten(
    examples.params_of(loopformer, config, SPEC)
  )
  keys = jax.random.split(jax.random.key(5), len(params))
  pairs = zip(keys, params, strict=True)
  return jax.tree.unflatten(
    treedef, [x + 0.2 * jax.random.normal(key, x.shape) for key, x in pairs]
  )


class Oracle:
  """The formulas in NumPy, float64, for one row of tokens."""

  def __init__(self, params, config=SMALL):
    self.params = in_float64(params)
    self.config = config
    self.table = self.params["token_embedding"]["embedding"]

  def __call__(self, tokens, sizes):
    """tokens [T], dt_1 .. dt_M -> [x_1, .. x_M], each [T, D]."""
    x, time, states = self.table[tokens], 0.0, []
    for size in sizes:
      c = self.embedded("time", time) + self.embedded("size", size)
      x = self.stack(x, c)
      time += size
      states.append(x)
    return states

  def embedded(self, name, x):
    layer = self.params[f"{name}_embedding"]
    angles = [x * 10_000 ** (-j / 128) for j in range(128)]
    waves = np.array([*map(np.cos, angles), *map(np.sin, angles)])
    hidden = silu(waves @ layer["input"]["kernel"] + layer["input"]["bias"])
    return hidden @ layer["output"]["kernel"] + layer["output"]["bias"]

  def stack(self, x, c):
    width, heads = self.config.width, self.config.num_heads
    for index in range(self.config.num_layers):
      layer = layer_of(self.params["layers"], index)
      modulation = layer["modulation"]
      four = silu(c) @ modulation["kernel"] + modulation["bias"]
      g_a, g_m, s_a, s_m = (four[n * width :][:width] for n in range(4))
      normed = rms_normed(x) * (1 + s_a)
      x = x + g_a * attention(
        normed, layer["attention"], heads, self.config.rope_base
      )
      x = x + g_m * gelu_mlp(rms_normed(x) * (1 + s_m), layer["mlp"])
    return x

  def read(self, x):
    """The state after the final norm, and logits of real tokens."""
    normed = rms_normed(x) * self.params["final_norm"]["scale"]
    return normed, normed @ self.table[:-PADDING].T

  def losses(self, sizes, long=None):
    """Of `BATCH`: the cross-entropy and, given x_long, the squared distance.

    Also the last states of the rows after the norm, [B, T, D].
    """
    states, nats, apart = [], [], []
    for row, tokens in enumerate(np.asarray(TOKENS)):
      normed, logits = self.read(self(tokens, sizes)[-1])
      most = logits.max(-1, keepdims=True)
      logs = logits - most - np.log(np.exp(logits - most).sum(-1)[:, None])
      nats.append(-logs[np.arange(len(tokens)), np.asarray(TARGETS)[row]])
      states.append(normed)
      if long is not None:
        apart.append(np.mean((long[row] - normed) ** 2, -1))
    weights = np.asarray(WEIGHTS, np.float64)
    means = [
      np.sum(np.array(x) * weights) / weights.sum() for x in (nats, apart) if x
    ]
    return *means, np.array(states)


@pytest.mark.parametrize("num_loops", [1, 3, 4, 6])
def test_numpy_agrees_with_any_number_of_loops(num_loops):
  """Loop k of M is a function of (k, M), of which K is unknown to it."""
  params = varied()
  output = examples.run(
    loopformer, SMALL, SPEC, TOKENS, params, num_loops=num_loops,
    trace=("hidden",), exact=True,
  )  # fmt: skip
  oracle = Oracle(params)
  states = oracle(np.asarray(TOKENS[0]), [1 / num_loops] * num_loops)
  close = {"rtol": 1e-6, "atol": 1e-6}
  np.testing.assert_allclose(output.trace["hidden"][:, 0], states, **close)
  normed, logits = oracle.read(states[-1])
  np.testing.assert_allclose(output.hidden[0], normed, **close)
  np.testing.assert_allclose(output.logits[0, :, :-PADDING], logits, **close)


def run_sizes(sizes, params):
  def run(params, sizes):
    model = examples.merged(loopformer, SMALL, SPEC, params)
    return model(TOKENS, step_sizes=sizes, trace=("hidden",))

  return without_rounding(run)(params, jnp.asarray(sizes, jnp.float32))


def test_numpy_agrees_on_unequal_steps_of_which_zeros_are_skipped():
  params, sizes = varied(), [0.5, 0.125, 0.375]
  output = run_sizes([*sizes, 0.0, 0.0], params)
  states = Oracle(params)(np.asarray(TOKENS[0]), sizes)
  close = {"rtol": 1e-6, "atol": 1e-6}
  hidden = output.trace["hidden"][:, 0]
  np.testing.assert_allclose(hidden[:3], states, **close)
  np.testing.assert_array_equal(hidden[3], hidden[2])
  np.testing.assert_array_equal(hidden[4], hidden[2])
  assert np.abs(states[2] - states[1]).max() > 0.1


def loss_of(short, consistency):
  """(parameters) -> (loss, metrics) of these weights."""
  config = dataclasses.replace(
    SMALL, short_weight=short, consistency_weight=consistency
  )

  def loss(params):
    model = examples.merged(loopformer, config, SPEC, params)
    return loopformer.loss(model, BATCH, KEY, jnp.zeros((), jnp.int32), None)

  return loss


@functools.cache
def loss_and_gradient():
  """(loss, metrics, gradients) in float64."""
  run = jax.value_and_grad(loss_of(0.5, 2.0), has_aux=True)
  (value, metrics), grads = without_rounding(run)(varied())
  return value, metrics, grads


def drawn():
  """The step sizes of the short trajectory that `KEY` draws."""
  key = jax.random.fold_in(KEY, loopformer._SHORT)
  sizes = np.asarray(loopformer.short_trajectory(key, 4))
  return [float(size) for size in sizes if size > 0]


def test_the_loss_is_that_of_both_trajectories():
  oracle, sizes = Oracle(varied()), drawn()
  assert 1 < len(sizes) < 4
  long, states = oracle.losses([0.25] * 4)
  short, apart, _ = oracle.losses(sizes, states)
  value, metrics, _ = loss_and_gradient()
  expected = {
    "cross_entropy": long,
    "short_cross_entropy": short,
    "consistency": apart,
    "short_loops": len(sizes),
  }
  for name, number in expected.items():
    np.testing.assert_allclose(metrics[name], number, rtol=1e-6, err_msg=name)
  total = long + 0.5 * short + 2.0 * apart
  np.testing.assert_allclose(value, total, rtol=1e-6)


def test_gradients_are_those_of_finite_differences():
  """Along a direction of each parameter; x_long has none from the distance."""
  base = in_float64(varied())
  _, fixed = Oracle(base).losses([0.25] * 4)
  sizes, step = drawn(), 1e-4

  def loss(params):
    oracle = Oracle(params)
    long, _ = oracle.losses([0.25] * 4)
    short, apart, _ = oracle.losses(sizes, fixed)
    return long + 0.5 * short + 2.0 * apart

  _, _, grads = loss_and_gradient()
  leaves, treedef = jax.tree.flatten(base)
  generator = np.random.default_rng(0)
  for index, (leaf, grad) in enumerate(
    zip(leaves, jax.tree.leaves(grads), strict=True)
  ):
    way = generator.normal(size=leaf.shape)
    way /= np.linalg.norm(way)

    def at(by, index=index, leaf=leaf, way=way):
      moved = [*leaves[:index], leaf + by * way, *leaves[index + 1 :]]
      return loss(jax.tree.unflatten(treedef, moved))

    near, far = (at(by) - at(-by) for by in (step, 2 * step))
    slope = (8 * near - far) / (12 * step)  # The error is O(step^4).
    np.testing.assert_allclose(np.sum(grad * way), slope, rtol=1e-5, atol=1e-8)
    assert abs(slope) > 1e-7


def test_weights_of_zero_leave_out_the_short_trajectory():
  value, metrics = without_rounding(loss_of(0.0, 0.0))(varied())
  assert {"short_cross_entropy", "consistency"}.isdisjoint(metrics)
  np.testing.assert_allclose(
    value, Oracle(varied()).losses([0.25] * 4)[0], rtol=1e-6
  )
  for weights in ((0.0, 2.0), (0.5, 0.0)):
    assert without_rounding(loss_of(*weights))(varied())[0] > value


def chances(num_loops):
  """Probabilities of the trajectories of short_trajectory, in units of 1/K."""
  found = collections.Counter()

  def add(sizes, rest, later, chance):
    if not later:
      found[(*sizes, rest)] += chance
      return
    most = rest - later
    for size in range(1, most + 1):
      add((*sizes, size), rest - size, later - 1, chance / most)

  for num_steps in range(1, num_loops):
    add((), num_loops, num_steps - 1, 1 / (num_loops - 1))
  return found


def test_short_trajectories_have_the_distribution_of_the_authors_code():
  expected = chances(5)
  assert sum(expected.values()) == pytest.approx(1)
  # Three steps: the first is 1, 2 or 3 fifths, also where the rest is fixed.
  assert expected[3, 1, 1] == pytest.approx(1 / 12)
  assert expected[1, 1, 3] == pytest.approx(1 / 36)
  num = 36_000
  keys = jax.random.split(jax.random.key(0), num)
  draw = functools.partial(loopformer.short_trajectory, num_loops=5)
  drawn = np.asarray(jax.jit(jax.vmap(draw))(keys))
  assert drawn.dtype == np.float32 and drawn.shape == (num, 4)
  units = np.rint(drawn * 5).astype(int)
  np.testing.assert_array_equal(drawn, units.astype(np.float32) / 5)
  assert (units.sum(1) == 5).all()
  counts = collections.Counter(
    tuple(int(size) for size in row[: np.count_nonzero(row)]) for row in units
  )
  assert counts.keys() == expected.keys()
  for sizes, chance in expected.items():
    deviation = np.sqrt(num * chance * (1 - chance))
    assert abs(counts[sizes] - num * chance) < 5 * deviation, sizes


def test_two_loops_have_one_shorter_trajectory():
  sizes = loopformer.short_trajectory(jax.random.key(0), 2)
  np.testing.assert_array_equal(sizes, [1.0])


def test_a_batch_has_one_trajectory_and_the_next_step_another():
  model = examples.merged(loopformer, SMALL, SPEC)

  @jax.jit
  def loops(batch, key):
    step = jnp.zeros((), jnp.int32)
    return loopformer.loss(model, batch, key, step, None)[1]["short_loops"]

  half = {name: x[1:] for name, x in BATCH.items()}
  half["row"] = jnp.array([1, 2])
  keys = jax.random.split(jax.random.key(1), 12)
  whole = [float(loops(BATCH, key)) for key in keys]
  assert whole == [float(loops(half, key)) for key in keys]
  assert {*whole} == {1.0, 2.0, 3.0}


def test_modulation_starts_small_and_not_at_zero():
  """N(0, init_std), as in the authors' code after its general start."""
  config = dataclasses.replace(SMALL, width=64, init_std=0.02)
  params = examples.params_of(loopformer, config, SPEC)
  start = params["layers"]["modulation"]
  assert np.std(start["kernel"]) == pytest.approx(0.02, rel=0.02)
  assert not start["bias"].any()
  trace = examples.run(
    loopformer, config, SPEC, TOKENS, trace=("hidden",)
  ).trace["hidden"]
  embedded = params["token_embedding"]["embedding"][TOKENS]
  assert 0 < np.abs(trace[-1] - embedded).max() < 0.05


def test_parameters_by_hand():
  config = loopformer.Config()
  spec = dataclasses.replace(SPEC, vocab_size=50_304)
  width, features = 2048, 5120
  block = 4 * width**2 + 2 * width * features + 4 * width * (width + 1)
  embedding = (256 + 1) * width + (width + 1) * width
  total = 50_304 * width + 3 * block + 2 * embedding + width
  assert examples.count(loopformer, config, spec) == total == 276_072_448


def test_costs_by_hand():
  spec = TaskSpec(1051, 4, ((0,),) * 4)
  config = loopformer.Config()
  found = loopformer.costs(config, spec, 8)
  width, tokens = 2048, 4
  matrices = 4 * width**2 + 2 * width * 5120 + 2 * tokens * width
  condition = 2 * (256 * width + width**2)
  per_loop = 3 * (tokens * matrices + 4 * width**2) + condition
  head = tokens * width * 1051
  by_loop = [2 * (head + loops * per_loop) for loops in range(1, 9)]
  assert found["flops_per_example"] == by_loop
  # Three forward passes each: of eight loops, and of four on average.
  training = 3 * (by_loop[7] + by_loop[3])
  assert found["training_flops_per_example"] == training
  alone = dataclasses.replace(config, short_weight=0.0, consistency_weight=0.0)
  assert "training_flops_per_example" not in loopformer.costs(alone, spec, 8)
