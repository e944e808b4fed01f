"""Order and noise depend on the seed alone."""

import itertools

import grain
import numpy as np
import pytest

from loopjax.data import pipeline


def make_batch(rows, positions):
  noise = pipeline.uniforms(5, positions, 3)
  return {"row": rows, "position": positions, "noise": noise}


def take(batches, start, num):
  return list(
    itertools.islice(pipeline.iterate(batches, start, num_threads=2), num)
  )


def training(batch_size=4, num_examples=10, seed=7, rows=None):
  return pipeline.training_batches(
    make_batch, num_examples, batch_size, seed, rows
  )


def endless():
  """An example depends on its position alone."""
  return pipeline.stream(lambda places: {"position": places}, 4)


@pytest.mark.parametrize("batches", [training, endless])
def test_any_start_gives_the_same_batches(batches):
  whole = take(batches(), 0, 12)
  for start in (1, 5, 9):
    resumed = take(batches(), start, 3)
    for got, expected in zip(resumed, whole[start:], strict=False):
      for name in expected:
        np.testing.assert_array_equal(got[name], expected[name])


def test_every_epoch_is_another_order_of_all_rows():
  rows = np.concatenate([b["row"] for b in take(training(batch_size=5), 0, 6)])
  epochs = rows.reshape(3, 10)
  for epoch in epochs:
    assert sorted(epoch) == list(range(10))
  assert not np.array_equal(epochs[0], epochs[1])


def test_the_seed_decides_the_order():
  first, second = (take(training(seed=s), 0, 1)[0]["row"] for s in (1, 2))
  assert not np.array_equal(first, second)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_are_rows_of_the_same_global_batches(num_parts):
  whole = take(training(batch_size=8), 0, 3)
  parts = []
  for rows in np.split(np.arange(8), num_parts):
    parts.append(take(training(batch_size=8, rows=rows), 0, 3))
  for index, expected in enumerate(whole):
    for name in expected:
      together = np.concatenate([part[index][name] for part in parts])
      np.testing.assert_array_equal(together, expected[name])


def test_a_stream_has_no_end():
  (batch,) = take(endless(), 10**12, 1)
  assert batch["position"].tolist() == [4 * 10**12 + i for i in range(4)]


def test_the_order_takes_no_memory():
  """Even for the maximum number of examples."""
  num = 2**32
  batches = pipeline.training_batches(make_batch, num, 64, 0)
  rows = np.concatenate([b["row"] for b in take(batches, 0, 20)])
  assert len(set(rows.tolist())) == len(rows)
  assert 0.45 < rows.mean() / num < 0.55


@pytest.mark.parametrize("num_examples", [1, 2, 3, 1000])
def test_an_order_has_every_example_once(num_examples):
  got = pipeline.shuffled(np.arange(num_examples), num_examples, 3)
  assert sorted(got.tolist()) == list(range(num_examples))


def test_all_examples_are_as_likely_at_a_place():
  """Over seeds, including consecutive ones."""
  places = np.array([0, 17, 2000, 3999])
  epochs = [pipeline.shuffled(places, 4000, 1, epoch) for epoch in range(250)]
  got = np.stack(epochs)
  counts = np.bincount(got.ravel() // 800, minlength=5)
  assert ((counts - 200) ** 2 / 200).sum() < 25  # Chi squared: p = 5e-5.
  assert abs(np.corrcoef(got[1:].ravel(), got[:-1].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
  "num", [1, 2, 1000, 20_000, 65_536, 65_538, 100_000, 2**18, 2**18 + 1]
)
def test_the_order_is_that_of_the_library(num):
  """However many examples there are, and whatever is computed at once."""
  places = np.random.default_rng(0).integers(0, num, 100)
  for seed in (0, 7):
    key = pipeline.stream_seed(seed, 1) % 2**32
    expected = [
      grain.experimental.index_shuffle(place, num - 1, key, 4)
      for place in places.tolist()
    ]
    assert pipeline.shuffled(places, num, seed, 1).tolist() == expected


@pytest.mark.parametrize("start", [0, 3])
def test_groups_are_batches_in_order(start):
  """Groups of the steps of a call begin at any batch."""
  single = take(training(), start, 6)
  (one, two) = itertools.islice(pipeline.iterate(training(), start, group=3), 2)
  for group, batches in ((one, single[:3]), (two, single[3:])):
    for name, array in group.items():
      expected = np.stack([batch[name] for batch in batches])
      np.testing.assert_array_equal(array, expected)
      assert array.dtype == expected.dtype


def test_evaluation_sees_every_row_once():
  batches = pipeline.evaluation_batches(make_batch, 10, 4)
  got = take(batches, 0, 99)
  assert len(got) == 3
  rows = np.concatenate([b["row"][b["valid"]] for b in got])
  np.testing.assert_array_equal(rows, np.arange(10))
  assert [b["valid"].sum() for b in got] == [4, 4, 2]


def test_uniforms_are_uniform_and_independent():
  draws = pipeline.uniforms(0, np.arange(20_000), 4)
  assert len(np.unique(draws)) == draws.size  # Neighbours share none.
  assert draws.min() >= 0
  assert draws.max() < 1
  np.testing.assert_allclose(draws.mean(0), 0.5, atol=0.01)
  np.testing.assert_allclose(draws.var(0), 1 / 12, atol=0.003)
  correlation = np.corrcoef(draws.T) - np.eye(4)
  assert np.abs(correlation).max() < 0.03
  after = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
  assert abs(after) < 0.03
  assert not np.array_equal(draws, pipeline.uniforms(1, np.arange(20_000), 4))


def test_uniforms_belong_to_positions():
  whole = pipeline.uniforms(3, np.arange(10), 5)
  np.testing.assert_array_equal(
    whole[[7, 2]], pipeline.uniforms(3, np.array([7, 2]), 5)
  )
