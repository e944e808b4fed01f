"""Differences of runs: how often a difference is seen where there is none."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from loopjax.run import statistics


def compared(differences, weights=None):
  differences = np.asarray(differences, float)
  ones = np.ones(len(differences))
  weights = ones if weights is None else weights
  return compare(differences, 0 * ones, weights)


def compare(*score):
  """Of one score."""
  return statistics.compare({"score": score})["score"]


def test_a_run_differs_from_itself_by_nothing():
  values = np.random.default_rng(0).normal(1, 0.2, 50)
  found = compare(values, values, np.ones(50))
  assert found == (0.0, 0.0, 0.0, 1.0)


def test_items_are_paired():
  """Items vary a lot, but equally in both runs: the difference is certain."""
  generator = np.random.default_rng(0)
  hard = generator.normal(2, 1, 400)
  noise = generator.normal(0, 0.1, 400)
  weights = generator.integers(1, 90, 400).astype(float)
  mean = compare(hard - 0.05 + noise, hard, np.ones(400))
  corpus = compare(hard - 0.05 + noise, hard, weights)
  assert mean.value == pytest.approx(np.mean(noise) - 0.05)
  assert corpus.value == pytest.approx(
    np.average(noise, weights=weights) - 0.05
  )
  # Normal distribution: 1.96 standard errors on both sides.
  half = 1.96 * np.std(noise) / 20
  assert mean.low == pytest.approx(mean.value - half, abs=0.002)
  assert mean.high == pytest.approx(mean.value + half, abs=0.002)
  assert mean.p == 2 / 10_001  # No subset has the opposite sign.
  # Different weights and noise; an unpaired test would give 0.1 and more.
  assert corpus.high - corpus.low < 0.04


def test_no_difference_is_not_certain():
  values = np.random.default_rng(1).normal(0, 1, 200)
  found = compared(values - values.mean())
  assert found.low < 0 < found.high and found.p > 0.9


@pytest.mark.parametrize("num", [1, 2, 5])
def test_fewer_than_six_items_decide_nothing(num):
  found = compared(np.arange(1.0, num + 1))
  assert found == ((num + 1) / 2, None, None, None)
  assert found.cells() == (f"{(num + 1) / 2:+.4f}", "too few items", "")


def test_items_without_weight_are_none():
  values, weights = np.arange(1.0, 9), np.array([1.0] * 5 + [0.0] * 3)
  assert compared(values, weights) == compared(values[:5])


@pytest.mark.parametrize(
  ("better", "worse", "same"), [(6, 0, 0), (5, 0, 3), (7, 1, 4), (9, 2, 0)]
)
def test_items_that_are_right_or_wrong_make_a_sign_test(better, worse, same):
  values = [1.0] * better + [-1.0] * worse + [0.0] * same
  num = better + worse
  tail = sum(math.comb(num, k) for k in range(worse + 1)) / 2**num
  assert compared(values).p == pytest.approx(min(1.0, 2 * tail))
  assert compared([-x for x in values]).p == compared(values).p


@pytest.mark.parametrize("num", [6, 8, 10])
def test_one_in_twenty_intervals_misses_the_difference_that_there_is(num):
  """Every choice of signs is as likely, whatever the sizes and weights.

  A bootstrap's miss 12, 12 and 10 %.
  """
  generator = np.random.default_rng(num)
  sizes = generator.lognormal(size=num)
  weights = generator.integers(1, 90, num).astype(float)
  all_signs = list(itertools.product((-1, 1), repeat=num))
  found = [
    compared(2.0 + sizes * sign / weights, weights) for sign in all_signs
  ]
  missed = np.mean([not each.low <= 2.0 <= each.high for each in found])
  assert missed == 2 * int(0.025 * 2**num) / 2**num
  zero = [compared(sizes * sign) for sign in all_signs]
  false = np.mean([each.p <= 0.05 for each in zero])
  assert missed == pytest.approx(false)


def test_all_scores_are_compared_at_once_in_little_memory():
  """The same subsets for each; of 100,000 items, no array of all of them."""
  generator = np.random.default_rng(0)
  ours, reference = generator.normal(size=(2, 100_000))
  weights = generator.integers(0, 3, 100_000)
  few = np.where(np.arange(100_000) < 7, weights + 1, 0)
  scores = {
    "few": (ours, reference, few),
    "many": (ours, reference, weights),
    "twice": (2 * ours, 2 * reference, weights),
  }
  tracemalloc.start()
  found = statistics.compare(scores)
  most = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert most < 100e6
  assert [*found] == [*scores]
  assert found["few"] == compare(ours[:7], reference[:7], few[:7])
  many, twice = found["many"], found["twice"]
  assert (twice.low, twice.high) == pytest.approx((2 * many.low, 2 * many.high))
  # Normal distribution.
  error = math.sqrt(2 * np.sum(weights**2)) / weights.sum()
  assert many.high - many.low == pytest.approx(3.92 * error, rel=0.05)


def test_random_subsets_stand_for_all():
  """14 items, of which not all subsets are used, and no empty one."""
  generator = np.random.default_rng(0)
  found = [compared(generator.normal(size=14)) for _ in range(200)]
  assert all(each.low <= each.value <= each.high for each in found)
  assert 0.01 < np.mean([each.p <= 0.05 for each in found]) < 0.1
