"""Possible samples and their frequencies, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_layers import softmax

from loopjax.errors import UserError
from loopjax.generate import sampling
from loopjax.generate.sampling import Sampling

LOGITS = np.random.default_rng(0).normal(size=(6, 13)).astype(np.float32) * 2
RULES = [
  Sampling(),
  Sampling(0.5, top_k=4),
  Sampling(1.5, top_p=0.7),
  Sampling(min_p=0.2),
  Sampling(0.8, 6, 0.8, 0.1),
  # Five tokens; probabilities are relative to these five.
  Sampling(2.0, top_k=5, top_p=0.75),
]


def expected(logits, rule):
  """Probabilities by the definition, step by step."""
  logits = logits.astype(np.float64) / rule.temperature
  if rule.top_k:
    logits[logits < np.sort(logits)[-rule.top_k]] = -np.inf
  order = np.argsort(-logits)
  before = np.cumsum(softmax(logits)[order]) - softmax(logits)[order]
  logits[order[before >= rule.top_p]] = -np.inf
  chances = softmax(logits)
  logits[chances < rule.min_p * chances.max()] = -np.inf
  return softmax(logits)


def test_what_is_left_out_is_as_defined():
  """Each row by its own rule, beside rows with all others."""
  rows = sampling.to_arrays(RULES)
  scaled = LOGITS / rows.temperature[:, None]
  found = np.asarray(jax.jit(sampling.allowed)(jnp.asarray(scaled), rows))
  for logits, rule, kept in zip(LOGITS, RULES, found, strict=True):
    np.testing.assert_array_equal(kept, expected(logits, rule) > 0)
  assert len({kept.sum() for kept in found}) >= 4


def test_one_token_stays_whatever_the_mass():
  """Also for a probability mass that is 0 in float32."""
  rows = sampling.to_arrays([Sampling(top_p=1e-50), Sampling(top_p=1e-9)])
  kept = np.asarray(sampling.allowed(jnp.asarray(LOGITS[:2]), rows))
  np.testing.assert_array_equal(kept.sum(axis=1), 1)
  np.testing.assert_array_equal(kept.argmax(1), LOGITS[:2].argmax(1))


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_tokens_are_drawn_as_often_as_they_should(rule):
  num = 4000
  rows = sampling.to_arrays([rule] * num)
  rows = rows._replace(seed=np.arange(num, dtype=np.uint32))
  logits = jnp.broadcast_to(LOGITS[0], (num, 13))
  seen = jnp.zeros(logits.shape, bool)
  drawn = jax.jit(sampling.draw)(logits, seen, rows, jnp.full(num, 3))
  shares = np.bincount(np.asarray(drawn), minlength=13) / num
  chances = expected(LOGITS[0], rule)
  assert not shares[chances == 0].any()
  # Four standard deviations.
  bounds = 4 * np.sqrt(chances * (1 - chances) / num)
  assert (np.abs(shares - chances) <= bounds).all()


def test_a_draw_is_of_its_seed_and_its_place():
  rows = sampling.to_arrays([Sampling(seed=one) for one in (1, 1, 2, 2, 1)])
  flat, seen = jnp.zeros((5, 997)), jnp.zeros((5, 997), bool)
  place = jnp.asarray([4, 4, 4, 5, 5])
  a, b, c, d, e = np.asarray(sampling.draw(flat, seen, rows, place)).tolist()
  assert a == b
  assert len({a, c, d, e}) == 4


def test_temperature_zero_takes_the_most_likely_whatever_the_others_do():
  rules = [Sampling(temperature=0), Sampling(5.0), Sampling(0, seed=9)]
  logits, seen = jnp.asarray(LOGITS[[0, 1, 0]]), jnp.zeros((3, 13), bool)
  found = sampling.draw(logits, seen, sampling.to_arrays(rules), jnp.arange(3))
  assert found[0] == found[2] == LOGITS[0].argmax()


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-37])
@pytest.mark.parametrize("rule", [{}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_the_coldest_draw_is_the_most_likely(temperature, rule):
  """Also where logits divided by the temperature are infinite in float32."""
  rows = sampling.to_arrays([Sampling(temperature, **rule)])
  logits, seen = jnp.asarray([[4.0, 9.0, 5.0]]), jnp.zeros((1, 3), bool)
  assert sampling.draw(logits, seen, rows, jnp.arange(1)) == 1


def test_the_penalty_lowers_what_was_seen():
  seen = jnp.zeros((1, 3), bool).at[0, :2].set(True)
  logits = jnp.asarray([[3.0, -3.0, 3.0]])
  found = sampling.penalised(logits, seen, jnp.asarray([1.5]))
  np.testing.assert_allclose(found, [[2.0, -4.5, 3.0]], rtol=1e-6)


@pytest.mark.parametrize(("field", "value"), [
  ("temperature", -1), ("temperature", float("nan")), ("top_k", 1.5),
  ("top_k", -1), ("top_p", 0), ("top_p", 1.1), ("min_p", 2),
  ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("seed", -1),
  ("seed", 2**32), ("seed", True),
])  # fmt: skip
def test_impossible_values_are_refused(field, value):
  with pytest.raises(UserError, match=field):
    Sampling(**{field: value})
