"""Rows that take, keep and finish examples."""

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.loop import supervision


def batch(offset):
  """Three examples of two tokens, all entries different."""
  numbers = jnp.arange(6).reshape(3, 2) + offset
  return {
    "inputs": numbers,
    "targets": numbers + 1000,
    "weights": numbers.astype(jnp.float32) + 2000,
  }


def test_halted_rows_start_over_and_others_go_on():
  rows = supervision.empty({"z": jnp.full((3, 2, 4), jnp.nan)}, 2)
  fresh = {"z": jnp.ones((3, 2, 4))}
  first = supervision.refilled(rows, batch(0), fresh)
  assert not first.halted.any() and not first.steps.any()
  np.testing.assert_array_equal(first.state["z"], fresh["z"])
  worked = first._replace(
    state={"z": 5 * fresh["z"]},
    steps=jnp.array([1, 2, 3]),
    halted=jnp.array([False, True, False]),
  )
  second = supervision.refilled(worked, batch(100), fresh)
  np.testing.assert_array_equal(second.state["z"][:, 0, 0], [5, 1, 5])
  np.testing.assert_array_equal(second.steps, [1, 0, 3])
  assert not second.halted.any()
  for name, value in second.example.items():
    old, new = batch(0)[name], batch(100)[name]
    np.testing.assert_array_equal(value, jnp.stack([old[0], new[1], old[2]]))


def test_rows_halt_when_they_want_to_and_at_the_last_segment():
  steps = jnp.array([1, 4, 4, 1, 5])
  wants = jnp.array([True, True, False, False, False])
  halted = supervision.halts(
    wants, steps, 5, 0.0, jax.random.split(jax.random.key(0), 5)
  )
  np.testing.assert_array_equal(halted, [True, True, False, False, True])


def test_explorers_stay_and_others_do_as_they_want():
  """Probability of a row that wants to halt to do so.

  After segment s of 5, with exploration q, it is 1 - q + q (s - 1) / 4: U{2..5}
  is at most s.
  """
  num, exploration = 40_000, 0.4
  wants = jnp.ones(num, bool)
  for step in range(1, 6):
    steps = jnp.full(num, step)
    keys = jax.random.split(jax.random.key(step), num)
    halted = supervision.halts(wants, steps, 5, exploration, keys)
    expected = 1 - exploration + exploration * (step - 1) / 4
    np.testing.assert_allclose(jnp.mean(halted), expected, atol=0.015)
    none = supervision.halts(~wants, steps, 5, exploration, keys)
    assert none.all() == none.any() == (step == 5)
