"""Distributions of the Depo task's random choices."""

import collections
import itertools

import numpy as np
import pytest

from loopjax.data.depo import task as depo_task


def assert_drawn_from(counts, chances):
  """Pearson's statistic is within five deviations of its mean."""
  counts, chances = np.array(counts, float), np.array(chances, float)
  assert counts.shape == chances.shape
  expected = counts.sum() * chances / chances.sum()
  assert expected.min() > 5
  freedom = len(counts) - 1
  statistic = ((counts - expected) ** 2 / expected).sum()
  assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_sizes_and_hops_of_training():
  settings = depo_task.Config()
  sizes, hops = depo_task.training_sizes(settings, 3, np.arange(40_000))
  assert (sizes.min(), sizes.max()) == (3, 75)
  chances = [1 / (n + np.sqrt(75)) for n in range(3, 76)]
  assert_drawn_from(np.bincount(sizes)[3:], chances)
  assert sizes.mean() == pytest.approx(27, abs=1)
  assert hops.shape == (40_000, 10)
  assert (hops.min(), hops.max()) == (1, 16)
  for column in hops.T:
    assert_drawn_from(np.bincount(column)[1:], np.ones(16))
  assert abs(np.corrcoef(sizes, hops[:, 0])[0, 1]) < 0.02
  assert abs(np.corrcoef(hops[:, 0], hops[:, 1])[0, 1]) < 0.02


def test_sizes_from_one_to_the_same():
  settings = depo_task.Config(min_nodes=75)
  sizes, _ = depo_task.training_sizes(settings, 0, np.arange(50))
  assert (sizes == 75).all()


def words(settings, num, count, seed=0):
  counts = np.full(num, count)
  return depo_task.draw_words(settings, seed, np.arange(num), counts)


def test_words_are_drawn_one_after_another():
  """P(a, b) = p(a) p(b) / (1 - p(a)); a word of 2 tokens is as likely as one.

  There are two words of one token and four of two.
  """
  settings = depo_task.Config(
    num_nodes=2, min_nodes=2, num_queries=2, word_base=2
  )
  chance = [1 / 4] * 2 + [1 / 8] * 4
  pairs = list(itertools.permutations(range(6), 2))
  chances = [chance[a] * chance[b] / (1 - chance[a]) for a, b in pairs]
  assert sum(chances) == pytest.approx(1)
  drawn = collections.Counter(map(tuple, words(settings, 20_000, 2).tolist()))
  assert set(drawn) <= set(pairs)
  assert_drawn_from([drawn[pair] for pair in pairs], chances)


def test_words_are_distinct_however_many():
  settings = depo_task.Config(num_nodes=72, word_base=8)
  got = words(settings, 20, 72)
  np.testing.assert_array_equal(
    np.sort(got, axis=1), np.tile(range(72), (20, 1))
  )
  some = words(settings, 20, 40)
  np.testing.assert_array_equal(some[:, :40], got[:, :40])
  assert (some[:, 40:] == -1).all()


def test_words_do_not_depend_on_the_other_examples():
  """Some words need more attempts than others."""
  settings = depo_task.Config(num_nodes=72, word_base=8)
  counts = np.array([5, 72, 30, 72, 2])
  together = depo_task.draw_words(settings, 0, np.arange(5), counts)
  for index in range(5):
    alone = depo_task.draw_words(
      settings, 0, np.array([index]), counts[index : index + 1]
    )
    np.testing.assert_array_equal(alone[0], together[index])


def test_orders_are_uniform_and_independent():
  """Cycle, order of the edges, order of the starts: 2 x 6 x 6 for 3 nodes."""
  settings = depo_task.Config(
    num_nodes=3, num_queries=3, word_base=3, max_word=1, context_length=6
  )
  num = 7200
  got = depo_task.examples(
    settings, 0, np.arange(num), np.full(num, 3), np.ones((num, 3), int)
  )["inputs"]
  assert (got >= 3).all()  # Every word ends with one such token.
  starts = got[:, [7, 11, 15]]
  seen = collections.Counter(
    (*edges, *start)
    for edges, start in zip(got[:, :6].tolist(), starts.tolist(), strict=True)
  )
  assert len(seen) == 72
  assert_drawn_from(list(seen.values()), np.ones(72))


def test_short_words_have_no_place_of_their_own():
  """They are drawn early, which must not affect the cycle.

  Successors of one-token nodes have one token as often as others.
  """
  settings = depo_task.Config()
  num = 2000
  got = depo_task.examples(
    settings, 0, np.arange(num), np.full(num, 75), np.ones((num, 10), int)
  )["inputs"][:, :300]
  short, both, expected = [], [], []
  for row in got.tolist():
    lengths, length = [], 0
    for token in row:
      length += token < 100
      if 50 <= token < 100:
        lengths.append(length)
        length = 0
    is_short = np.array(lengths).reshape(75, 2) == 1
    num_short = is_short[:, 0].sum()
    short.append(num_short / 75)
    both.append(is_short.all(axis=1).mean())
    expected.append(num_short / 75 * (num_short - 1) / 74)
  # After x draws of each length there are x words of two tokens, with few
  # duplicates, and 50 (1 - exp(-x / 50)) words of one token: 75 for x = 45.2.
  assert np.mean(short) == pytest.approx(1 - 45.2 / 75, abs=0.005)
  assert np.mean(both) == pytest.approx(np.mean(expected), abs=0.003)
