"""What the GSM task hands to models, and how it scores."""

import collections
import dataclasses
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gsm_reader import num_operations, read

from loopjax.data import TASKS, pipeline
from loopjax.data.gsm import language, problems, task
from loopjax.types import Output

SMALL = task.Config(
  train_ops=(1, 3, 8),
  eval_ops=(1, 2, 5, 8),
  context_length=140,
  min_length=100,
  max_length=140,
  num_eval_examples=40,
)


def batches(config, split, num=None, start=0, **kwargs):
  kwargs = {"batch_size": 16, "seed": 0, **kwargs}
  dataset = task.make_dataset(config, split, **kwargs)
  iterator = pipeline.iterate(dataset.batches, start, num_threads=0)
  return list(itertools.islice(iterator, num))


def joined(config, split, num=None, **kwargs):
  parts = batches(config, split, num, **kwargs)
  return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}


def assert_equal(got, expected):
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value)


def operations(config, inputs):
  """How many the text has."""
  lines = problems.text(config, inputs).split("\n")
  return num_operations(read(lines[:-1]))


def test_padding_and_weights_are_where_the_spec_says():
  """Before the context and after the answer; weights on the answer."""
  spec = task.spec(SMALL)
  for split in ("train", "test"):
    got = joined(SMALL, split, 3)
    real = spec.vocab_size - spec.num_padding_tokens
    assert language.PADDING == real == got["inputs"].max()
    assert got["targets"].max() < real
    assert spec.sequence_length == got["inputs"].shape[1] == 144
    valid = (got["inputs"] < real).astype(int)
    assert (np.diff(valid[:, :140], axis=1) >= 0).all()
    assert (np.diff(valid[:, 140:], axis=1) <= 0).all()
    assert valid[:, 139].all()
    # As many tokens are predicted as are read: ANS and the digits.
    np.testing.assert_array_equal(got["weights"][:, 140:], valid[:, 140:])
    assert not got["weights"][:, :140].any()
    assert not got["targets"][got["weights"] == 0].any()
    chunk, targets = got["inputs"][:, 140:], got["targets"][:, 140:]
    both = valid[:, 141:] == 1
    np.testing.assert_array_equal(chunk[:, 1:][both], targets[:, :-1][both])


def test_training_has_all_numbers_of_operations_as_often():
  got = joined(SMALL, "train", 20)["inputs"]
  counts = collections.Counter(operations(SMALL, inputs) for inputs in got)
  assert set(counts) == {1, 3, 8}
  assert min(counts.values()) > 80


def test_evaluation_has_as_many_examples_for_each_number_of_operations():
  dataset = task.make_dataset(SMALL, "test", batch_size=16, seed=0)
  assert dataset.groups == {"operations": ("1", "2", "5", "8")}
  assert dataset.facts["test_examples"] == 40
  got = joined(SMALL, "test")
  groups = got["group/operations"][got["valid"]]
  assert groups.dtype == np.int32
  assert len(groups) == 40
  assert np.bincount(groups).tolist() == [10] * 4
  assert set(groups[:4].tolist()) == set(range(4))
  for inputs, group in zip(got["inputs"], got["group/operations"], strict=True):
    assert operations(SMALL, inputs) == SMALL.eval_ops[group]


@pytest.mark.parametrize("split", ["train", "test"])
def test_examples_belong_to_their_index(split):
  """Whatever the size of the batches, the start and who reads them."""
  whole = joined(SMALL, split, 16, batch_size=2)
  assert_equal(joined(SMALL, split, 2, batch_size=16), whole)
  resumed = joined(SMALL, split, 1, start=1, batch_size=16)
  assert_equal(resumed, {n: v[16:32] for n, v in whole.items()})
  rows = np.array([1, 5, 14])
  some = joined(SMALL, split, 2, rows=rows)
  places = (16 * np.arange(2)[:, None] + rows).ravel()
  assert_equal(some, {n: v[places] for n, v in whole.items()})


def test_each_stream_has_its_seed():
  def inputs(split, seed=0, **values):
    config = dataclasses.replace(SMALL, **values)
    return joined(config, split, 1, seed=seed)["inputs"]

  def differ(first, second):
    return not (first == second).all(axis=1).any()

  assert differ(inputs("train"), inputs("train", seed=1))
  assert differ(inputs("train"), inputs("test"))
  assert differ(inputs("test"), inputs("test", eval_seed=1))
  np.testing.assert_array_equal(inputs("test"), inputs("test", seed=1))
  np.testing.assert_array_equal(inputs("train"), inputs("train", eval_seed=1))


def test_the_data_stays():
  """Another number here means other data: results no longer compare."""
  sha = hashlib.sha256()
  config = task.Config(num_eval_examples=16)
  for split in ("train", "test"):
    sha.update(batches(config, split, 1)[0]["inputs"].tobytes())
  assert sha.hexdigest().startswith("04205ada77c0be1f")


def test_batches_have_the_shapes_that_are_announced():
  (batch,) = batches(SMALL, "train", 1)
  got = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in batch.items()}
  assert got == task.abstract_batch(SMALL, 16)
  assert TASKS["gsm"] is task


@pytest.mark.parametrize("num_last", [4, 6])
def test_scores_of_hand_made_answers(num_last):
  """Whether the logits are of all tokens or of the answer chunk alone."""
  batch = {
    "targets": jnp.array([[0, 0, 1, 2, 3, 0], [0, 0, 2, 3, 0, 0]]),
    "weights": jnp.array([[0.0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]),
  }
  small = np.log1p(3 * np.exp(-2.0))
  for answers, exact, errors in (
    ([[3, 3, 1, 2, 3, 3], [1, 1, 2, 3, 1, 1]], [1, 1], [0, 0]),
    ([[0, 0, 1, 2, 0, 0], [0, 0, 2, 3, 0, 0]], [0, 1], [1 / 3, 0]),
    ([[0, 0, 0, 0, 3, 0], [0, 0, 2, 0, 0, 0]], [0, 0], [2 / 3, 1 / 2]),
  ):
    logits = 2 * np.eye(5, dtype=np.float32)[np.array(answers)]
    logits[..., -1] = -np.inf  # As models do to padding.
    output = Output(jnp.array(logits[:, -num_last:]), {}, {}, {}, {})
    scores = task.score(output, batch)
    assert scores["exact_match"].tolist() == exact
    np.testing.assert_allclose(
      scores["loss"], small + 2 * np.array(errors), rtol=1e-5
    )
    assert all(value.dtype == jnp.float32 for value in scores.values())
