"""The loop kinds are one loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.errors import UserError
from loopjax.loop import driver


def step(weight, carry, k):
  """A carry that is done once its first entry exceeds 2."""
  running = carry[0] < 2.0
  grown = jnp.where(running, jnp.tanh(weight * carry) + carry + 0.1, carry)
  return grown, {"value": grown, "k": k}


def run(weight, kind, remat="none", num_steps=9):
  return driver.run_loop(
    lambda carry, k: step(weight, carry, k),
    jnp.array([0.3, 0.1]),
    num_steps,
    kind=kind,
    remat=remat,
    done_fn=lambda carry: carry[0] >= 2.0,
  )


def test_kinds_agree_in_values():
  scan, records, steps = run(0.7, "scan")
  unrolled, unrolled_records, _ = run(0.7, "unroll")
  early, early_records, early_steps = run(0.7, "while")
  assert jnp.array_equal(scan, unrolled)
  assert jnp.array_equal(scan, early)
  assert jnp.array_equal(records["value"], unrolled_records["value"])
  assert steps == 9
  assert 0 < early_steps < 9
  run_part = slice(0, int(early_steps))
  assert jnp.array_equal(
    records["value"][run_part], early_records["value"][run_part]
  )
  assert not early_records["value"][int(early_steps) :].any()


@pytest.mark.parametrize("kind", ["scan", "unroll"])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_repeated_functions_are_applied_as_often_as_asked(num_steps, kind):
  found = driver.repeat(
    lambda x: 3 * x + 1, jnp.asarray(2), num_steps, kind=kind
  )
  assert found == 3**num_steps * 2 + (3**num_steps - 1) // 2


@pytest.mark.parametrize("kind", driver.KINDS)
def test_a_loop_of_no_steps_changes_nothing(kind):
  carry, records, steps = run(0.7, kind, num_steps=0)
  assert jnp.array_equal(carry, jnp.array([0.3, 0.1]))
  assert records["value"].shape == (0, 2)
  assert steps == 0


def test_while_without_done_runs_every_step():
  carry, _, steps = driver.run_loop(
    lambda carry, k: (carry + k, ()), jnp.asarray(0), 5, kind="while"
  )
  assert (carry, steps) == (10, 5)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_kinds_and_remat_agree_in_gradients(remat):
  def value(weight, kind):
    return jnp.sum(run(weight, kind, remat)[0])

  expected = jax.grad(value)(0.7, "unroll")
  assert expected != 0
  np.testing.assert_allclose(jax.grad(value)(0.7, "scan"), expected, rtol=1e-6)


def test_while_has_no_reverse_mode_and_says_so():
  with pytest.raises(ValueError, match="Reverse-mode"):
    jax.grad(lambda w: jnp.sum(run(w, "while")[0]))(0.7)


def test_scan_compiles_one_step():
  def text(num_steps):
    return str(
      jax.make_jaxpr(lambda w: run(w, "scan", num_steps=num_steps))(0.7)
    )

  assert len(text(30)) < 1.1 * len(text(3))


def test_unknown_kind_is_named():
  with pytest.raises(ValueError, match="'for'"):
    run(0.7, "for")


WEIGHT = jnp.array([[0.2, -0.5, 0.1], [0.4, 0.1, -0.3], [0.0, 0.3, 0.2]])
X = jnp.array([0.5, -1.0, 0.3])


@pytest.mark.parametrize("want_first", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 2, 4, 9])
def test_cut_gradients_are_those_of_the_last_steps(want_first, kept):
  """Values never change; every step uses x, the first uses the start."""

  def value(x, start):
    first, last, records = driver.run_truncated(
      lambda z, n: (jnp.tanh(WEIGHT @ z + x * (n + 1)), n),
      start,
      4,
      num_with_gradient=kept,
      want_first=want_first,
    )
    assert (first is None) != want_first
    return jnp.sum(last), records

  def expected(x, start):
    for n in range(4):
      if kept and 0 < n == 4 - kept:
        start = jax.lax.stop_gradient(start)
      at = x if kept == 0 or n >= 4 - kept else jax.lax.stop_gradient(x)
      start = jnp.tanh(WEIGHT @ start + at * (n + 1))
    return jnp.sum(start)

  (got, records), slopes = jax.value_and_grad(value, (0, 1), has_aux=True)(
    X, X / 2
  )
  wanted, wanted_slopes = jax.value_and_grad(expected, (0, 1))(X, X / 2)
  assert records.tolist() == [0, 1, 2, 3]
  np.testing.assert_allclose(got, wanted, rtol=1e-5)
  for x, y in zip(slopes, wanted_slopes, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_part_of_the_carry_is_cut_between_all_steps_before_the_last():
  """Of four steps, the last has a gradient.

  The other part keeps its whole gradient, except contributions through the
  first part over more than one step.
  """

  def step(carry, n):
    cut, free = carry
    new = jnp.tanh(WEIGHT @ cut + 0.5 * free + X * (n + 1))
    return (new, jnp.sin(free) + new), n

  def stop(carry):
    return jax.lax.stop_gradient(carry[0]), carry[1]

  def value(start):
    _, last, _ = driver.run_truncated(
      step, start, 4, num_with_gradient=1, cut_fn=stop, want_first=False
    )
    return jnp.sum(last[0] * last[1])

  def expected(carry):
    for n in range(4):
      carry, _ = step(stop(carry) if n else carry, n)
    return jnp.sum(carry[0] * carry[1])

  got, wanted = (jax.grad(f)((X, X / 2)) for f in (value, expected))
  for x, y in zip(got, wanted, strict=True):
    assert jnp.abs(y).max() > 1e-3
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_state_is_recorded_after_its_edit():
  """Of a carry of two, the first is the state."""

  def doubled(carry, k):
    x, sums = carry
    return (2 * x, sums + x), {"index": k}

  part = driver.Part(
    lambda carry: {"x": carry[0]}, lambda carry, state: (state["x"], carry[1])
  )

  def run(edit=None, loops=None, before=0, first=0):
    kind = driver.Watched(edit, loops, before)
    start, num = (jnp.ones(2), jnp.zeros(2)), 4 - first
    return driver.run_loop(
      doubled, start, num, kind=kind, part=part, first=first
    )

  def add(state, k):
    return {"x": state["x"] + jnp.where(k == 1, 100.0, 0.0)}

  (x, sums), records, steps = run(add)
  np.testing.assert_array_equal(records["state"]["x"][:, 0], [2, 104, 208, 416])
  np.testing.assert_array_equal(records["index"], range(4))
  assert (x[0], sums[0], steps) == (416, 1 + 2 + 104 + 208, 4)

  # Loops 2 and 3 alone begin with what the edit makes of the first carry.
  (x, sums), records, steps = run(add, range(2, 4))
  np.testing.assert_array_equal(records["state"]["x"][:, 0], [202, 404])
  np.testing.assert_array_equal(records["index"], [2, 3])
  assert (sums[0], steps) == (101 + 202, 2)

  _, records, _ = run(add, before=1)
  np.testing.assert_array_equal(
    records["state"]["x"][:, 0], [102, 204, 408, 816]
  )
  _, records, _ = run(add, first=1)
  np.testing.assert_array_equal(records["state"]["x"][:, 0], [102, 204, 408])


def test_steps_that_differ_are_watched_too():
  def scaled(carry, k, weight):
    return weight * carry, {"index": k}

  items = (jnp.array([2.0, 3.0, 5.0]),)

  def run(kind):
    return driver.run_over(scaled, jnp.ones(1), items, 3, kind=kind)

  carry, records = run("scan")
  assert carry[0] == 30 and records["index"].tolist() == [0, 1, 2]
  carry, records = run(driver.Watched(lambda x, k: x + k))
  assert records["state"][:, 0].tolist() == [2, 7, 37]
  carry, records = run(driver.Watched(lambda x, k: 0 * x + 7, range(1, 2)))
  assert records["state"].tolist() == [[7]] and records["index"].tolist() == [1]


def test_an_edit_of_another_shape_is_one_line():
  def run(edit):
    return driver.run_loop(
      lambda x, k: (x, {}), jnp.ones(2), 3, kind=driver.Watched(edit)
    )

  for edit in (lambda x, k: x[:1], lambda x, k: {"x": x}, lambda x, k: x > 0):
    with pytest.raises(UserError, match=r"edit\(state, k\) must return"):
      run(edit)
