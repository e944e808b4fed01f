"""Edits between loops, which change nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from multihop_models import LENGTH, STATE, TOKENS, model_of
from tests_support import by_size, crossing

from loopjax.analysis.multihop import instrumented
from loopjax.loop import driver

TARGETS = jnp.array([4, 7, 11])
POSITIONS = jnp.array([1, 2, 1])


def test_norms_of_equation_3():
  vectors, states = jax.random.normal(jax.random.key(0), (2, 5, 8))
  scaled = {
    kind: instrumented.at_scale(vectors, 7 * states, kind, lambda x: x + 1)
    for kind in instrumented.NORMS
  }
  rms = np.sqrt(np.mean(np.asarray(vectors) ** 2, -1, keepdims=True))
  np.testing.assert_allclose(scaled["rms"], vectors / rms, rtol=1e-5)
  lengths = np.linalg.norm(scaled["match_hidden"], axis=-1)
  np.testing.assert_allclose(
    lengths, 7 * np.linalg.norm(states, axis=-1), rtol=1e-5
  )
  ratio = np.asarray(scaled["match_hidden"] / vectors)
  np.testing.assert_allclose(ratio, ratio[:, :1] + 0 * ratio, rtol=1e-5)
  assert (ratio > 0).all()
  np.testing.assert_array_equal(scaled["final_norm"], vectors + 1)


@pytest.mark.long
def test_a_blend_is_between_these_loops_at_these_positions_alone():
  state = jax.random.normal(jax.random.key(0), (3, LENGTH, 8))
  vectors = jax.random.normal(jax.random.key(1), (3, 8))
  here = jnp.arange(LENGTH)[None] == POSITIONS[:, None]

  def blend(k, alpha, loop=2):
    return instrumented.blend(
      {"hidden": state},
      jnp.asarray(k),
      loop=jnp.asarray(loop),
      here=here,
      alpha=jnp.asarray(alpha),
      vectors=vectors,
    )["hidden"]

  assert jnp.array_equal(blend(1, 0.0), state)
  for k in (0, 2):
    assert jnp.array_equal(blend(k, 1.0), state)
  whole, half = blend(1, 1.0), blend(1, 0.5)
  for row, position in enumerate(POSITIONS.tolist()):
    assert jnp.array_equal(whole[row, position], vectors[row])
    np.testing.assert_allclose(
      half[row, position], (state[row, position] + vectors[row]) / 2, rtol=1e-6
    )
  there = ~here[:, :, None]
  for blended in (whole, half):
    assert jnp.array_equal(jnp.where(there, blended, 0), state * there)


class _Given:
  """An embedding layer that returns given states."""

  def __init__(self, table, states):
    self.embedding, self.states = table, states

  def __call__(self, tokens):
    return self.states


@pytest.mark.long
@crossing("name", by_size(STATE))
@pytest.mark.parametrize("loop", [1, 2])
def test_the_next_loop_starts_from_the_edited_state(name, loop):
  """The rest of an edited run equals a run from the edited state."""
  build, params, table = model_of(name)
  state = STATE[name]

  def run(params, edit=None, num_loops=3, start=None):
    kind = None if edit is None else driver.Watched(edit)
    model = build(params)
    if start is not None:
      model.token_embedding = _Given(table, start)
    return model(
      TOKENS, num_loops=num_loops, trace=("hidden", state), kind=kind
    )

  normed = instrumented.at_scale(table[TARGETS], None, "rms", None)

  def edited(params, alpha):
    here = jnp.arange(LENGTH)[None] == POSITIONS[:, None]
    edit = functools.partial(
      instrumented.blend, loop=loop, here=here, alpha=alpha, vectors=normed
    )
    return run(params, edit)

  plain = jax.jit(run)(params)
  edited = jax.jit(edited)
  untouched = edited(params, 0.0)
  np.testing.assert_allclose(untouched.logits, plain.logits, atol=1e-5)
  np.testing.assert_allclose(
    untouched.trace["hidden"], plain.trace["hidden"], atol=1e-5
  )
  start = plain.trace[state][loop - 1]
  square = jnp.mean(table[TARGETS] ** 2, axis=-1)[:, None]
  start = start.at[jnp.arange(3), POSITIONS].set(
    table[TARGETS] / jnp.sqrt(square + 1e-6)
  )
  rest = jax.jit(functools.partial(run, num_loops=3 - loop))(
    params, start=start
  )
  whole = edited(params, 1.0)
  np.testing.assert_allclose(whole.logits, rest.logits, atol=1e-4)
  np.testing.assert_allclose(
    whole.trace["hidden"][loop:], rest.trace["hidden"], atol=1e-4
  )
  assert jnp.abs(whole.logits - plain.logits).max() > 0.1


@pytest.mark.long
def test_an_edit_can_take_the_channel_away():
  """DiscoLoop with H~ edited back to H is the vanilla loop."""
  build, params, _ = model_of("disco")
  vanilla, _, _ = model_of("looped")

  def run(params, kind=None, build=build):
    return build(params)(TOKENS, num_loops=2, trace=("hidden",), kind=kind)

  plain = jax.jit(run)(params)
  hidden = plain.trace["hidden"][0]

  def taken_away(state, k):
    return {"hidden": jnp.where(k == 0, hidden, state["hidden"])}

  kind = driver.Watched(taken_away)
  without = jax.jit(functools.partial(run, kind=kind))(params)
  expected = jax.jit(functools.partial(run, build=vanilla))(params)
  np.testing.assert_allclose(without.logits, expected.logits, atol=1e-4)
  assert jnp.abs(plain.logits - expected.logits).max() > 0.1
