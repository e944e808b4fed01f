"""Halting rules against a token-by-token reference in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.loop import halting

EPSILON = 0.05


def run(rule, probabilities):
  """probabilities [K, N] -> weights [K, N], last state."""
  state = rule.init(probabilities.shape[1:])
  weights = []
  for k, p in enumerate(probabilities):
    last = jnp.asarray(k == len(probabilities) - 1)
    weight, state = rule.update(state, p, last)
    weights.append(weight)
  return jnp.stack(weights), state


def act_by_hand(probabilities, epsilon, forced=True):
  """One token: (weights, steps, remainder), as Graves 2016 defines them."""
  total, weights, steps = 0.0, [], 0
  for k, p in enumerate(probabilities):
    steps += 1
    last = forced and k == len(probabilities) - 1
    if total + p >= 1 - epsilon or last:
      return weights + [1 - total], steps, 1 - total
    weights.append(p)
    total += p
  return weights, steps, 0.0


@pytest.fixture
def probabilities():
  rng = np.random.default_rng(0)
  columns = [rng.uniform(0, high, 12) for high in (0.02, 0.1, 0.3, 0.6, 1.0)]
  columns.append(np.full(12, 0.96))  # Stops at once.
  columns.append(np.zeros(12))  # Never stops on its own.
  return jnp.asarray(np.stack(columns, axis=1), jnp.float32)


@pytest.mark.parametrize("forced", [True, False])
def test_act_equals_the_reference(probabilities, forced):
  weights, state = run(halting.ACT(EPSILON, forced), probabilities)
  for token in range(probabilities.shape[1]):
    column = np.asarray(probabilities[:, token], np.float64)
    expected, steps, remainder = act_by_hand(column, EPSILON, forced)
    expected = np.pad(expected, (0, len(column) - len(expected)))
    np.testing.assert_allclose(weights[:, token], expected, atol=1e-6)
    assert state.steps[token] == steps
    np.testing.assert_allclose(state.remainder[token], remainder, atol=1e-6)


@pytest.mark.parametrize(
  "rule", [halting.ACT(EPSILON), halting.PonderNet(), halting.FixedSteps()]
)
def test_weights_are_a_distribution(rule, probabilities):
  weights, state = run(rule, probabilities)
  assert (weights >= 0).all()
  np.testing.assert_allclose(weights.sum(0), 1.0, atol=1e-6)
  assert state.halted.all()


def test_forced_stop_gives_the_rest_to_the_last_step(probabilities):
  weights, state = run(halting.ACT(EPSILON), probabilities)
  never = probabilities.shape[1] - 1
  assert weights[-1, never] == 1.0
  assert state.steps[never] == len(probabilities)
  unforced, _ = run(halting.ACT(EPSILON, forced=False), probabilities)
  assert unforced[:, never].sum() == 0.0


def test_nothing_counts_after_the_stop(probabilities):
  weights, state = run(halting.ACT(EPSILON), probabilities)
  for token, steps in enumerate(np.asarray(state.steps, int)):
    assert not weights[steps:, token].any()


def test_act_cost_gradient_is_that_of_the_remainder():
  """d(N + R)/dp is -1 before the stopping step and 0 from there on."""

  def cost(p):
    return jnp.sum(run(halting.ACT(EPSILON), p[:, None])[1].cost)

  p = jnp.array([0.2, 0.3, 0.25, 0.4, 0.1])  # Stops at the fourth step.
  np.testing.assert_allclose(jax.grad(cost)(p), [-1, -1, -1, 0, 0])


def test_pondernet_is_the_geometric_product(probabilities):
  weights, state = run(halting.PonderNet(), probabilities)
  p = np.asarray(probabilities, np.float64)
  alive = np.cumprod(np.concatenate([np.ones((1, p.shape[1])), 1 - p[:-1]]), 0)
  expected = alive * p
  expected[-1] = alive[-1]
  np.testing.assert_allclose(weights, expected, atol=1e-6)
  order = np.arange(1, len(p) + 1)[:, None]
  np.testing.assert_allclose(state.cost, (order * expected).sum(0), rtol=1e-5)


def test_fixed_counts_the_last_step_only(probabilities):
  weights, state = run(halting.FixedSteps(), probabilities)
  assert not weights[:-1].any()
  assert (weights[-1] == 1).all()
  assert (state.steps == len(probabilities)).all()
