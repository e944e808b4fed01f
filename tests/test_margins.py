"""`pytest --margin`: comparisons that come close to their tolerance."""

import jax.numpy as jnp
import margins
import numpy as np
import pytest


def test_a_margin_is_the_share_of_the_tolerance():
  assert margins.margin([1.0, 2.0], [1.0, 2.5], atol=1.0) == pytest.approx(0.5)
  assert margins.margin(1.02, 1.0, rtol=0.1) == pytest.approx(0.2)
  assert margins.margin(jnp.bfloat16(1.0), 1.25, 0.0, 1.0) == 0.25
  alike = [np.nan, np.inf, 0.0]
  assert margins.margin(alike, alike) == margins.margin([], []) == 0.0


def test_comparisons_close_to_their_tolerance_are_named():
  with margins.within(0.3):
    np.testing.assert_allclose(1.02, 1.0, rtol=0.1)
    np.testing.assert_allclose([np.inf, 0.0], [np.inf, 0.0])
  with (
    pytest.raises(AssertionError, match=r"0\.1 .*\n.*test_margins.py:\d+ .*20"),
    margins.within(0.1),
  ):
    np.testing.assert_allclose(1.02, 1.0, 0.1)
    np.testing.assert_allclose(1.005, 1.0, rtol=0.1)


def test_a_comparison_that_fails_is_reported_as_ever():
  compare = np.testing.assert_allclose
  with (
    pytest.raises(AssertionError, match="Not equal to tolerance rtol=0.1"),
    margins.within(0.3),
  ):
    np.testing.assert_allclose(2.0, 1.0, rtol=0.1)
  assert np.testing.assert_allclose is compare
