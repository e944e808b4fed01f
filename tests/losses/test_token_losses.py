"""Cross-entropies of tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.losses import tokens


def stablemax_cross_entropy(logits, targets):
  of_softmax = tokens.DISTRIBUTIONS["stablemax"](logits)
  return tokens.token_cross_entropy(of_softmax, targets)


def test_stablemax_is_its_definition():
  """s(x) / sum s with s(x) = x + 1, or 1 / (1 - x) below 0; in float64."""
  random = np.random.default_rng(0)
  logits = np.float32(3 * random.normal(size=(4, 5, 7)))
  targets = random.integers(0, 7, (4, 5))
  x = logits.astype(np.float64)
  s = np.where(x < 0, 1 / (1 - np.minimum(x, 0)), x + 1)
  chances = s / s.sum(-1, keepdims=True)
  expected = -np.log(np.take_along_axis(chances, targets[..., None], -1))
  found = stablemax_cross_entropy(jnp.asarray(logits), targets)
  np.testing.assert_allclose(found, expected[..., 0], rtol=1e-5)


def test_stablemax_has_a_gradient_at_one_and_far_away():
  """At 1 the branch for negative logits would divide by zero."""
  logits = jnp.array([[1.0, -1e6, 1e6, 0.0]])
  loss = jax.grad(lambda x: jnp.sum(stablemax_cross_entropy(x, jnp.array([0]))))
  assert jnp.isfinite(loss(logits)).all()
  # A softmax this confident in a wrong token has no smaller gradient.
  assert loss(logits)[0, 0] < -0.1
