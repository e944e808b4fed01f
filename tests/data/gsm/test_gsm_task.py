"""The GSM task's batches and scores."""

import collections
import functools

import data_examples
import jax.numpy as jnp
import numpy as np
import pytest
from gsm_reader import num_operations, read

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


joined = functools.partial(data_examples.joined, task)


def operations(config, inputs):
  """Number of operations in the text."""
  lines = problems.text(config, inputs).split("\n")
  return num_operations(read(lines[:-1]))


def test_padding_and_weights_are_where_the_spec_says():
  """Padding before the context and after the answer; weights on the answer."""
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
    # As many predictions as inputs: ANS and the digits.
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


@pytest.mark.parametrize("num_last", [4, 6])
def test_scores_of_hand_made_answers(num_last):
  """With logits of all tokens or of the answer chunk only."""
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
    logits[..., -1] = -np.inf  # As models mask padding.
    output = Output(jnp.array(logits[:, -num_last:]), {}, {}, {}, {})
    scores = task.score(output, batch)
    assert scores["exact_match"].tolist() == exact
    np.testing.assert_allclose(
      scores["loss"], small + 2 * np.array(errors), rtol=1e-5
    )
    assert all(value.dtype == jnp.float32 for value in scores.values())


@pytest.mark.parametrize("length", [92, 512, 3300, 11_000])
def test_the_grid_has_twice_as_many_names_as_quantities(length):
  settings = task.Config(context_length=length, min_length=0, max_length=length)
  names = settings.grid_side**2
  assert names >= settings.num_names == 8 + length // 7
  if length < 5500:  # Largest possible size.
    assert 2 * settings.num_names <= names < 3 * settings.num_names
