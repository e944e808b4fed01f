"""Exits against sums of probabilities in float64, and cases of rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.loop import exits

FEW_OPERATIONS = 8 * np.finfo(np.float32).eps
LOGITS = np.random.default_rng(0).normal(size=(4, 3, 5)) * 2


def chances(logits):
  """p_t by definition, in float64."""
  leave = 1 / (1 + np.exp(-logits.astype(np.float64)))
  stay = np.cumprod(1 - leave, axis=0)
  before = np.concatenate([np.ones_like(stay[:1]), stay[:-1]])
  return np.concatenate([(before * leave)[:-1], before[-1:]])


def test_the_distribution_is_as_defined_and_sums_to_one():
  found = jnp.exp(exits.log_distribution(jnp.asarray(LOGITS, jnp.float32)))
  np.testing.assert_allclose(found, chances(LOGITS), rtol=1e-5)
  np.testing.assert_allclose(found.sum(axis=0), 1.0, rtol=1e-6)


def test_the_last_gate_decides_nothing():
  slope = jax.grad(lambda x: exits.log_distribution(x).sum())(
    jnp.asarray(LOGITS, jnp.float32)
  )
  assert not jnp.any(slope[-1])
  assert jnp.all(slope[:-1] != 0)


@pytest.mark.parametrize("size", [8.0, 30.0, 200.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_gate_that_is_sure_has_finite_logarithms_and_slopes(size, sign):
  logits = jnp.full((4, 1), sign * size)

  def entropy(x):
    log_chance = exits.log_distribution(x)
    return -jnp.sum(jnp.exp(log_chance) * log_chance)

  value, slope = jax.value_and_grad(entropy)(logits)
  assert jnp.isfinite(exits.log_distribution(logits)).all()
  assert jnp.isfinite(value) and jnp.isfinite(slope).all()


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9, 0.999])
def test_the_first_loop_whose_cumulative_chance_reaches_the_threshold(
  threshold,
):
  reached = np.cumsum(chances(LOGITS), axis=0) >= threshold
  found = exits.first_exit(jnp.asarray(LOGITS, jnp.float32), threshold)
  assert np.array_equal(found, np.argmax(reached, axis=0))


def test_the_default_threshold_of_one_never_exits():
  """Published code in bfloat16 rounds a sigmoid to 1: exits after one loop."""
  logits = jnp.full((4, 2), 100.0)
  assert jax.nn.sigmoid(jnp.bfloat16(6.5)) == 1.0
  assert jnp.array_equal(exits.first_exit(logits, 1.0), jnp.full(2, 3))
  assert jnp.array_equal(exits.first_exit(logits, 0.999), jnp.zeros(2))


def test_logits_in_bfloat16_do_not_round_chances():
  """For a confident gate, 1 - sigmoid(8) is 0 in bfloat16, and 3.4e-4 here."""
  sure_and_not = np.tile([8.0, 0.25], (3, 1))  # Exact in bfloat16.
  found = jnp.exp(exits.log_distribution(jnp.bfloat16(sure_and_not)))
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, chances(sure_and_not), rtol=1e-5)


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9, 1.0])
def test_loop_by_loop_rows_leave_at_the_first_such_loop(threshold):
  """Or with the last permitted loop; inactive rows never run."""
  logits = jnp.asarray(LOGITS.reshape(4, 15), jnp.float32)
  most = jnp.arange(15) % 4 + 1
  there = jnp.arange(15) > 0
  given = exits.ExitPolicy(jnp.full(15, threshold), most, "gate")
  running = exits.start(there)
  for evidence in logits:
    running = exits.after_loop(given, "gate", running, evidence)
  expected = jnp.minimum(exits.first_exit(logits, threshold) + 1, most)
  assert np.array_equal(running.loops, jnp.where(there, expected, 0))
  assert not running.live.any()


@pytest.mark.parametrize("rule", ["change", *exits.READ_OUT])
def test_what_has_settled_leaves_unless_the_threshold_is_one(rule):
  threshold = jnp.asarray([0.9, 0.9, 1.0])
  given = exits.ExitPolicy(threshold, jnp.full(3, 9), rule)
  evidence = jnp.asarray([0.05, 0.2, 0.0])
  running = exits.after_loop(given, rule, exits.start(threshold > 0), evidence)
  assert running.live.tolist() == [False, True, True]


def test_changes_and_entropies_are_relative():
  before, after = jnp.asarray([[3.0, 4.0]]), jnp.asarray([[0.0, 8.0]])
  for found, expected in (
    (exits.relative_change(before, after), 5 / 8),
    (exits.relative_entropy(jnp.zeros((1, 7))), 1.0),
  ):
    np.testing.assert_allclose(found, expected, rtol=FEW_OPERATIONS)
  padded = jnp.asarray([[0.0, 0.0, 0.0, -1e9]])  # As `token_logits` pads.
  found = exits.relative_entropy(padded, 1)
  np.testing.assert_allclose(found, 1.0, rtol=FEW_OPERATIONS)
  sure = jnp.asarray([[100.0, 0.0, 0.0]])
  np.testing.assert_allclose(exits.relative_entropy(sure), 0.0, atol=1e-6)


def read_outs(rule, logits, padding=0):
  """The evidence [K, B] of logits [K, B, V]."""
  seen, found = exits.no_read_outs(rule, *logits.shape[1:]), []
  for one in logits:
    evidence, seen = exits.read_out_evidence(rule, seen, one, padding)
    found.append(np.asarray(evidence))
  return np.stack(found)


def test_a_read_out_diverges_from_the_one_before():
  """KL(new || old) in nats; the first has none before it."""
  chances = np.array([[[0.5, 0.5]], [[0.8, 0.2]], [[0.8, 0.2]]])
  found = read_outs("kl", jnp.log(jnp.asarray(chances)))
  expected = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
  np.testing.assert_allclose(found[:, 0], [np.inf, expected, 0], atol=1e-6)


def test_a_stable_token_is_the_same_several_times():
  """A threshold of 0.8 requires five consecutive loops."""
  best = [2, 1, 1, 1, 1, 1, 0]
  logits = jax.nn.one_hot(jnp.asarray(best), 3)[:, None]
  found = read_outs("stable", logits)[:, 0]
  np.testing.assert_allclose(found, 1 / np.array([1, 1, 2, 3, 4, 5, 1]), 1e-5)
  policy = exits.ExitPolicy(jnp.array([0.8]), jnp.array([9]), "stable")
  running, left = exits.start(jnp.array([True])), []
  for evidence in found:
    running = exits.after_loop(
      policy, "stable", running, jnp.asarray([evidence], jnp.float32)
    )
    left.append(not running.live[0])
  assert left.index(True) == 5  # After the sixth loop, the fifth with a 1.
