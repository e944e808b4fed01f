"""Batches of tasks in a single process."""

import itertools

import numpy as np

from loopjax.data import pipeline


def read(task, config, split, num=None, start=0, **options):
  """(the dataset, `num` batches of 16 from batch `start` on)."""
  options = {"batch_size": 16, "seed": 0, **options}
  dataset = task.make_dataset(config, split, **options)
  iterator = pipeline.iterate(dataset.batches, start, num_threads=0)
  return dataset, list(itertools.islice(iterator, num))


def joined(task, config, split, num=None, start=0, **options):
  """The concatenated rows of these batches."""
  parts = read(task, config, split, num, start, **options)[1]
  return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}


def assert_equal(got, expected):
  """Asserts equal arrays with equal names."""
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
