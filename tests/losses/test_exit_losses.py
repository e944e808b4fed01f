"""Both objectives of an exit gate in float64, with their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_layers import sigmoid

from loopjax.loop import exits as loop_exits
from loopjax.losses import exits

SHAPE = (4, 2, 6)
RANDOM = np.random.default_rng(1)
LOGITS = RANDOM.normal(size=SHAPE)
LOSSES = RANDOM.gamma(2.0, size=SHAPE) * 0.02 + 0.1
WEIGHTS = (RANDOM.uniform(size=SHAPE[1:]) < 0.6).astype(np.float64)
BETA = 0.3


def expected(losses, logits):
  """sum_t p_t loss_t - beta H(p), token by token and loop by loop."""
  total = 0.0
  for where in zip(*np.nonzero(WEIGHTS), strict=True):
    left, value = 1.0, 0.0
    for loop in range(len(losses)):
      leave = sigmoid(logits[loop][where]) if loop < len(losses) - 1 else 1.0
      chance = left * leave
      value += chance * losses[loop][where] + BETA * chance * np.log(chance)
      left *= 1 - leave
    total += value
  return total / WEIGHTS.sum()


def improvement(losses, logits):
  """Binary cross-entropy with k = 50, gamma = 0.005."""
  total = 0.0
  for where in zip(*np.nonzero(WEIGHTS), strict=True):
    value = 0.0
    for loop in range(1, len(losses)):
      better = max(0.0, LOSSES[loop - 1][where] - LOSSES[loop][where])
      go_on = sigmoid(50.0 * (better - 0.005))
      leave = sigmoid(logits[loop][where])
      value -= go_on * np.log(1 - leave) + (1 - go_on) * np.log(leave)
    total += value / (len(losses) - 1)
  return total / WEIGHTS.sum()


def slopes(function, x, step=1e-6):
  """Central differences of a scalar function."""
  found = np.zeros_like(x)
  for where in np.ndindex(x.shape):
    sides = []
    for sign in (1, -1):
      moved = x.copy()
      moved[where] += sign * step
      sides.append(function(moved))
    found[where] = (sides[0] - sides[1]) / (2 * step)
  return found


def ours(objective, losses, logits):
  batch = {"weights": jnp.asarray(WEIGHTS, jnp.float32)}
  return compute(objective, losses, logits, batch)


def compute(objective, losses, logits, batch):
  """(value, metrics)"""
  losses, logits = (jnp.asarray(x, jnp.float32) for x in (losses, logits))
  if objective == "improvement":
    return exits.improvement(losses, logits, batch), {}
  log_chance = loop_exits.log_distribution(logits)
  return exits.expected(losses, log_chance, batch, BETA)


@pytest.mark.parametrize("plain", [expected, improvement])
def test_the_objective_and_its_gradients(plain):
  run = jax.value_and_grad(ours, argnums=(1, 2), has_aux=True)
  (value, metrics), (by_loss, by_logit) = jax.jit(run, static_argnums=0)(
    plain.__name__,
    jnp.asarray(LOSSES, jnp.float32),
    jnp.asarray(LOGITS, jnp.float32),
  )
  np.testing.assert_allclose(value, plain(LOSSES, LOGITS), rtol=1e-5)
  close = {"rtol": 1e-4, "atol": 1e-6}
  numeric = slopes(lambda x: plain(LOSSES, x), LOGITS)
  np.testing.assert_allclose(by_logit, numeric, **close)
  numeric = slopes(lambda x: plain(x, LOGITS), LOSSES)
  if plain is improvement:  # The losses are constants.
    numeric = np.zeros_like(numeric)
  np.testing.assert_allclose(by_loss, numeric, **close)
  if plain is improvement:
    return
  np.testing.assert_allclose(metrics["exit_chance"].sum(), 1.0, rtol=1e-5)
  mean = (LOSSES * WEIGHTS).sum(axis=(1, 2)) / WEIGHTS.sum()
  np.testing.assert_allclose(metrics["loop_loss"], mean, rtol=1e-5)


@pytest.mark.long
def test_the_entropy_pulls_to_uniform_exits():
  """Equal losses: the minimum is at 1 / K each, where H is log K."""
  losses = jnp.full((4, 1, 1), 0.5)
  batch = {"weights": jnp.ones((1, 1))}
  chance = np.array([1 / 4, 1 / 3, 1 / 2, 1 / 2])  # Of the remaining ones.
  logits = jnp.asarray(np.log(chance / (1 - chance)), jnp.float32)

  def run(x):
    return compute("expected", losses, x[:, None, None], batch)

  (value, metrics), slope = jax.value_and_grad(run, has_aux=True)(logits)
  np.testing.assert_allclose(metrics["exit_entropy"], np.log(4), rtol=1e-6)
  np.testing.assert_allclose(value, 0.5 - BETA * np.log(4), rtol=1e-5)
  np.testing.assert_allclose(slope, 0.0, atol=1e-6)


@pytest.mark.long
def test_parts_of_a_batch_average_to_the_whole():
  """By "mean_weight", as for microbatches."""
  mean = jnp.asarray(WEIGHTS.mean(), jnp.float32)
  for objective in ("expected", "improvement"):
    whole, _ = ours(objective, LOSSES, LOGITS)
    parts = []
    for row in range(SHAPE[1]):
      part = {
        "weights": jnp.asarray(WEIGHTS[row : row + 1], jnp.float32),
        "mean_weight": mean,
      }
      arrays = (x[:, row : row + 1] for x in (LOSSES, LOGITS))
      parts.append(compute(objective, *arrays, part)[0])
    np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-5)
