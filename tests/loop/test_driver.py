"""The loop kinds are one loop."""

import jax
import jax.numpy as jnp
import pytest

from loopjax.loop import driver


def step(weight, carry, k):
  """A carry that is done once its first entry passes 2."""
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
  assert jnp.allclose(jax.grad(value)(0.7, "scan"), expected, rtol=1e-6)


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
