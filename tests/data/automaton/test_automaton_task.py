"""The automaton task's batches and scores."""

import dataclasses
import functools

import data_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_automaton_rule import scalar

from loopjax.data.automaton import task
from loopjax.types import Output

SMALL = task.Config(
  num_states=3, state_width=7, num_steps=5, num_eval_examples=50
)


joined = functools.partial(data_examples.joined, task)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("num_steps", [0, 1, 32])
def test_every_label_is_the_first_cell_later(split, num_steps):
  config = dataclasses.replace(SMALL, num_steps=num_steps)
  got = joined(config, split, 3)
  for inputs, targets in zip(got["inputs"], got["targets"], strict=True):
    states = inputs[:21].reshape(3, 7)
    assert set(states.ravel().tolist()) <= {0, 1}
    labels = [scalar(s, num_steps, 110)[0] for s in states.tolist()]
    assert inputs[21:].tolist() == [2, *labels[:-1]]
    assert targets.tolist() == [0] * 21 + labels
  np.testing.assert_array_equal(
    got["weights"], np.tile([0.0] * 21 + [1.0] * 3, (48, 1))
  )


def test_another_rule_has_other_labels():
  """Rule 204 keeps every cell, rule 51 inverts it."""
  first = joined(dataclasses.replace(SMALL, rule=204), "train", 1)
  other = joined(dataclasses.replace(SMALL, rule=51), "train", 1)
  cells = first["inputs"][:, :21:7]
  np.testing.assert_array_equal(first["targets"][:, 21:], cells)
  np.testing.assert_array_equal(other["targets"][:, 21:], 1 - cells)


def test_the_constant_floor_is_the_papers_chance():
  """About a tenth at t = 32; chance is a sixteenth, and an eighth at t = 1."""
  config = task.Config(num_eval_examples=20_000)
  dataset = task.make_dataset(config, "test", batch_size=5000, seed=0)
  floor = dataset.facts["constant_floor"]
  assert floor == pytest.approx(0.0995175, abs=2e-4)  # See test_automaton_rule.
  assert floor == pytest.approx(0.1006, abs=2e-3)
  got = joined(config, "test", batch_size=5000)
  right = (got["targets"][:, -4:] == 1).all(axis=1).mean()
  assert right == pytest.approx(floor, abs=4 * np.sqrt(0.09 / 20_000))
  for num_steps, expected in ((0, 0.5**4), (1, (5 / 8) ** 4)):
    changed = dataclasses.replace(config, num_steps=num_steps)
    facts = task.make_dataset(changed, "train", batch_size=8, seed=0).facts
    assert facts["constant_floor"] == pytest.approx(expected, abs=5e-4)
  # Here the best constant answer is 0: one neighbourhood of eight gives 1.
  rare = task.Config(num_states=2, state_width=5, num_steps=1, rule=1)
  facts = task.make_dataset(rare, "train", batch_size=8, seed=0).facts
  assert facts["constant_floor"] == (7 / 8) ** 2


def test_cells_are_independent_coins():
  got = joined(task.Config(num_steps=0), "train", 4, batch_size=2048)
  cells = got["inputs"][:, :96].astype(float)
  assert len(np.unique(cells, axis=0)) == 8192
  np.testing.assert_allclose(cells.mean(axis=0), 0.5, atol=0.025)
  correlation = np.corrcoef(cells.T) - np.eye(96)
  assert np.abs(correlation).max() < 0.06
  assert abs(np.corrcoef(cells[:-1, 0], cells[1:, 0])[0, 1]) < 0.06


def test_evaluation_holds_as_many_as_asked_for():
  got = joined(SMALL, "test")
  assert got["valid"].sum() == 50
  assert len(np.unique(got["inputs"][got["valid"]], axis=0)) == 50


def test_scores_of_hand_made_answers():
  """Only the answer chunk counts."""
  batch = {
    "targets": jnp.array([[0, 1, 0], [0, 1, 1], [0, 0, 0]]),
    "weights": jnp.array([[0.0, 1, 1]] * 3),
  }
  answers = jnp.array([[1, 1, 0], [0, 1, 0], [0, 1, 1]])
  logits = 2.0 * jax.nn.one_hot(answers, 4)
  logits = logits.at[..., -1].set(-jnp.inf)  # As models mask padding.
  scores = task.score(Output(logits, {}, {}, {}, {}), batch)
  assert scores["exact_match"].tolist() == [1, 0, 0]
  assert scores["label_accuracy"].tolist() == [1, 0.5, 0]
  small = np.log1p(2 * np.exp(-2.0))
  np.testing.assert_allclose(
    scores["loss"], small + np.array([0, 1, 2]), rtol=1e-4
  )
  assert all(value.dtype == jnp.float32 for value in scores.values())
