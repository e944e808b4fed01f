"""Order and noise depend on the seed alone."""

import itertools

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


def test_any_start_gives_the_same_batches():
  whole = take(training(), 0, 12)
  for start in (1, 5, 9):
    resumed = take(training(), start, 3)
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


def test_evaluation_sees_every_row_once():
  batches = pipeline.evaluation_batches(make_batch, 10, 4)
  got = take(batches, 0, 99)
  assert len(got) == 3
  rows = np.concatenate([b["row"][b["valid"]] for b in got])
  np.testing.assert_array_equal(rows, np.arange(10))
  assert [b["valid"].sum() for b in got] == [4, 4, 2]


def test_uniforms_are_uniform_and_independent():
  draws = pipeline.uniforms(0, np.arange(20_000), 4)
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
