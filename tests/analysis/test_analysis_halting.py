"""Halting statistics on handmade weights and on the rules' weights."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.analysis import halting
from loopjax.loop import halting as rules
from loopjax.models import MODELS

# [K = 3, B = 1, S = 3]: stops after 2, 3 and 1 steps.
_WEIGHT = np.array([[[0.4, 0.1, 1.0]], [[0.6, 0.0, 0.0]], [[0.0, 0.9, 0.0]]])


def test_steps_taken_counts_to_the_last_step_that_weighs():
  np.testing.assert_array_equal(halting.steps_taken(_WEIGHT), [[2, 3, 1]])


def test_expected_steps_is_the_mean_of_the_step_under_the_weights():
  steps = halting.expected_steps(_WEIGHT)
  np.testing.assert_allclose(steps, [[1.6, 2.8, 1.0]])


@pytest.mark.parametrize(
  ("rule", "count"),
  [
    (rules.ACT(0.05), halting.steps_taken),
    (rules.PonderNet(), halting.expected_steps),
    (rules.FixedSteps(), halting.steps_taken),
  ],
)
def test_agrees_with_what_the_rule_counts(rule, count):
  probability = np.random.default_rng(0).uniform(0, 0.6, (6, 4, 5))
  state, weights = rule.init((4, 5)), []
  for k, p in enumerate(probability.astype(np.float32)):
    weight, state = rule.update(state, jnp.asarray(p), jnp.asarray(k == 5))
    weights.append(weight)
  steps = count(np.stack(weights))
  np.testing.assert_allclose(steps, state.steps, rtol=1e-5)


def test_memory_and_cells_are_counted_apart():
  steps = np.array([[1, 3, 3], [2, 3, 1]])
  parts = halting.by_kind(steps, 1)
  shares = {name: halting.histogram(x, 3) for name, x in parts.items()}
  np.testing.assert_allclose(shares["memory"], [0.5, 0.5, 0.0])
  np.testing.assert_allclose(shares["cells"], [0.25, 0.0, 0.75])


def test_without_memory_there_are_cells_alone():
  (cells,) = halting.by_kind(np.array([[1.4, 1.6]]), 0).values()
  np.testing.assert_allclose(halting.histogram(cells, 3), [0.5, 0.5, 0.0])


@pytest.mark.parametrize(
  ("family", "rule", "trace", "steps"),
  [
    ("hrm", "", "weight", 2),  # Its config names no rule.
    ("utm", "act", "weight", 2),
    ("utm", "ponder", "weight", 1.5),
    ("utm", "fixed", "weight", None),
    ("hrm", "", "prediction", None),  # It never stops early.
  ],
)
def test_a_model_that_weights_its_steps_stops(family, rule, trace, steps):
  weight = np.full((2, 1, 1), 0.5)
  evaluated = types.SimpleNamespace(
    settings=types.SimpleNamespace(
      family=MODELS[family], model=types.SimpleNamespace(halting=rule)
    ),
    output=types.SimpleNamespace(trace={trace: weight}),
  )
  found = halting.ponder_steps(evaluated)
  assert found is None if steps is None else found == steps
