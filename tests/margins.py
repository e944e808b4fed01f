"""The fraction of tolerances used by comparisons: `pytest --margin=0.3`."""

import contextlib
import functools
import inspect
import traceback
from unittest import mock

import numpy as np


def margin(actual, desired, rtol=1e-7, atol=0.0) -> float:
  """The largest |actual - desired| / (atol + rtol |desired|)."""
  actual, desired = (np.asarray(x, np.float64) for x in (actual, desired))
  with np.errstate(all="ignore"):
    error = np.abs(actual - desired)
    shares = error / (atol + rtol * np.abs(desired))
  return float(np.where(error > 0, shares, 0.0).max(initial=0.0))


@contextlib.contextmanager
def within(limit: float):
  """Comparisons by `np.testing.assert_allclose` may use at most this fraction.

  Otherwise the end raises an `AssertionError` that names each line and its
  largest margin. Other processors sum in a different order.
  """
  compare, found = np.testing.assert_allclose, {}

  @functools.wraps(compare)
  def measured(actual, desired, rtol=1e-7, atol=0.0, *args, **options):
    compare(actual, desired, rtol, atol, *args, **options)
    share = margin(actual, desired, rtol, atol)
    if share > limit:
      place = _place()
      found[place] = max(found.get(place, 0.0), share)

  with mock.patch.object(np.testing, "assert_allclose", measured):
    yield
  if found:
    lines = (f"{place} uses {share:.2f}" for place, share in found.items())
    message = "\n  ".join((f"more than {limit} of a tolerance:", *lines))
    raise AssertionError(message)


def _place() -> str:
  """The line of the comparison in a test module."""
  for frame, line in traceback.walk_stack(inspect.currentframe()):
    name = frame.f_code.co_filename.rpartition("/")[2]
    if name.startswith("test_"):
      return f"{name}:{line}"
  return "?"
