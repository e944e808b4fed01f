"""Random depths: their distribution, and loops with random depths."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.loop import depth, driver


def mean(chances):
  return float(chances @ np.arange(1, len(chances) + 1))


def test_huginns_mean_is_one_more_than_it_says():
  """Its sampler adds 1 to a Poisson count of mean 32."""
  chances = depth.probabilities("poisson_lognormal", 32.0)
  np.testing.assert_allclose(mean(chances), 33.0, atol=1e-5)
  rate_variance = 32.0**2 * (math.exp(0.5**2) - 1)  # Log-normal.
  spread = chances @ (np.arange(1, len(chances) + 1) - 33.0) ** 2
  np.testing.assert_allclose(spread, 32.0 + rate_variance, rtol=1e-4)


@pytest.mark.parametrize("centre", [0.3, 5.0, 32.0, 90.0, 250.0])
def test_the_mass_of_every_depth_is_that_of_an_integral_over_rates(centre):
  """By another rule at twenty times the nodes, with a small relative error.

  64 Gauss-Hermite nodes misplaced 0.8 % of the mass at 90 and 8 % at 250.
  """
  found = depth.probabilities("poisson_lognormal", centre)
  edges = np.linspace(-8.0, 8.0, 20 * 1500 + 1)
  z = (edges[1:] + edges[:-1]) / 2  # The midpoint rule.
  weights = np.exp(-(z**2) / 2)
  weights /= weights.sum()
  log_rates = math.log(centre) - 1 / 8 + z / 2
  for count in {0, 1, 3, *range(0, len(found), max(len(found) // 30, 1))}:
    log_chances = count * log_rates - np.exp(log_rates) - math.lgamma(count + 1)
    wanted = weights @ np.exp(log_chances)
    assert found[count] == pytest.approx(wanted, rel=1e-7, abs=1e-10)


def test_parcaes_poisson_has_no_zero():
  chances = depth.probabilities("poisson", 8.0)
  expected = [math.exp(-8.0) * 8.0**n / math.factorial(n) for n in range(1, 20)]
  expected[0] += math.exp(-8.0)  # 0 becomes 1.
  np.testing.assert_allclose(chances[:19], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["poisson", "poisson_lognormal"])
def test_a_calibrated_mean_holds_below_a_maximum(kind):
  for most in (0, 12):
    centre = depth.calibrated(kind, 5.0, most)
    chances = depth.probabilities(kind, centre, most)
    np.testing.assert_allclose(mean(chances), 5.0, atol=1e-6)
    assert not most or len(chances) == most


def test_a_large_mean_is_calibrated_without_a_search(monkeypatch):
  """Huginn's is one more than it says; others need few distributions."""
  made, make = [], depth.probabilities.__wrapped__

  def counted(*arguments):
    made.append(arguments)
    return make(*arguments)

  monkeypatch.setattr(depth, "probabilities", counted)
  calibrated = depth.calibrated.__wrapped__
  assert calibrated("poisson_lognormal", 4000.0, 0) == 3999 and not made
  assert calibrated("poisson_lognormal", 1.0, 0) == pytest.approx(0, abs=2e-3)
  centre = calibrated("poisson_lognormal", 200.0, 300)
  assert 200 < centre < 300 and len(made) < 20


def test_a_fixed_depth_and_expectations():
  np.testing.assert_array_equal(depth.probabilities("fixed", 3), [0, 0, 1])
  np.testing.assert_allclose(depth.expected(np.full(7, 1 / 7), 2), 13 / 7)


@pytest.mark.parametrize("kind", depth.DEPTHS)
def test_draws_have_the_distribution(kind):
  chances = depth.probabilities(kind, 6.0)
  keys = jax.random.split(jax.random.key(3), 100_000)
  draws = np.asarray(
    jax.jit(jax.vmap(lambda key: depth.draw(key, chances)))(keys)
  )
  assert draws.min() >= 1 and draws.max() <= len(chances)
  found = np.bincount(draws, minlength=len(chances) + 1)[1:] / len(draws)
  error = np.sqrt(chances * (1 - chances) / len(draws))
  assert np.all(np.abs(found - chances) <= 5 * error + 1e-4)


WEIGHT = jax.random.normal(jax.random.key(0), (4, 4))
START = jax.random.normal(jax.random.key(1), (3, 4))
ADDED = jax.random.normal(jax.random.key(2), (3, 4))


def step(shared, carry, k):
  weight, added = shared
  return jnp.tanh(carry @ weight + added + 0.1 * k)


def drawn(weight, added, start, depths, last):
  return depth.run(step, (weight, added), start, depths, last)


def every(weight, added, start, depths, remat):
  return depth.run_all(step, (weight, added), start, depths, 9, remat=remat)


def truncated(weight, added, start, num_loops, last):
  """With the driver for static numbers."""

  def one(carry, k):
    hidden, weight, added = carry
    return (step((weight, added), hidden, k), weight, added), None

  def cut(carry):
    return jax.tree.map(jax.lax.stop_gradient, carry)

  split = max(num_loops - last, 0)
  hidden = start
  for k in range(split):
    hidden = step(cut((weight, added)), jax.lax.stop_gradient(hidden), k)
  hidden = jax.lax.stop_gradient(hidden) if split else hidden
  carry = hidden, weight, added
  carry, _, _ = driver.run_loop(
    lambda carry, k: one(carry, k + split), carry, num_loops - split
  )
  return carry[0]


def value_and_gradients(run, *args):
  def total(weight, added, start):
    return jnp.sum(jnp.sin(3 * run(weight, added, start, *args)))

  return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(WEIGHT, ADDED, START)


@pytest.mark.parametrize("num_loops", [1, 3, 4, 7])
@pytest.mark.parametrize("last", [1, 3, 9])
def test_loops_that_are_drawn_are_those_that_are_fixed(num_loops, last):
  """Values and all gradients; none to the start if a loop is truncated."""
  got = value_and_gradients(drawn, jnp.asarray(num_loops), last)
  expected = value_and_gradients(truncated, num_loops, last)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)
  assert bool(jnp.any(got[1][2] != 0)) == (num_loops <= last)
  if last == 9:  # All loops: unneeded ones may be skipped.
    for remat in (False, True):
      got = value_and_gradients(every, jnp.asarray(num_loops), remat)
      for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("run", [
  functools.partial(depth.run, num_with_gradient=50),
  functools.partial(depth.run_all, max_loops=50, remat=True),
], ids=["run", "run_all"])  # fmt: skip
def test_weights_are_kept_once_for_all_loops(run):
  """And with recomputation, a loop stores only its carry."""
  x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  start = jax.ShapeDtypeStruct((3, 4), jnp.float32)

  def residuals(weight, added, start, depths):
    return jax.vjp(
      lambda *x: run(step, x[:2], x[2], depths), weight, added, start
    )[1]

  depths = jax.ShapeDtypeStruct((), jnp.int32)
  kept = jax.eval_shape(residuals, x, start, start, depths)
  shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
  assert (50, 4, 4) not in shapes
  carries = sum(shape == (50, 3, 4) for shape in shapes)
  assert carries == 1 if run.func is depth.run_all else carries <= 3


def test_a_row_is_what_it_is_alone_at_its_own_depth():
  """Its value, and its gradient to its own input and to the parameters."""
  depths = jnp.array([2, 6, 1])

  def counted(shared, carry, k):  # Rows count loops separately.
    return step(shared, carry, k.reshape(-1, 1))

  def total(added, start, depths, rows):
    end = depth.run(counted, (WEIGHT, added), start, depths, 2)
    return jnp.sum(end[rows] ** 2)

  for row, own in enumerate([2, 6, 1]):
    together = jax.grad(total)(ADDED, START, depths, row)[row]
    one = slice(row, row + 1)
    alone = jax.grad(total)(ADDED[one], START[one], jnp.asarray(own), 0)[0]
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_one_program_serves_all_depths():
  compiled = jax.jit(functools.partial(drawn, WEIGHT, ADDED, START, last=2))
  ends = [compiled(depths=jnp.asarray(n)) for n in (1, 5, 30)]
  assert compiled._cache_size() == 1
  assert not np.allclose(ends[0], ends[1])


def test_depths_beyond_the_maximum_are_not_listed(monkeypatch):
  """A wide distribution has hundreds of them; their sum is known."""
  whole = {
    kind: depth.probabilities(kind, 90.0)
    for kind in ("poisson", "poisson_lognormal")
  }
  listed, plain = [], depth._masses
  monkeypatch.setattr(
    depth, "_masses", lambda *args: listed.append(args[-1]) or plain(*args)
  )
  for kind, chances in whole.items():
    cut = depth.probabilities.__wrapped__(kind, 90.0, 40)
    assert len(cut) == 40 and max(listed) <= 128
    np.testing.assert_allclose(cut[:-1], chances[:39], rtol=1e-6)
    np.testing.assert_allclose(cut.sum(), 1)
