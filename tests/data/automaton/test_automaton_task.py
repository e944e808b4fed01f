"""Automata against scalar code; the task's batches and scores."""

import dataclasses
import functools

import data_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.data.automaton import task
from loopjax.types import Output

RULE_110 = {
  (1, 1, 1): 0, (1, 1, 0): 1, (1, 0, 1): 1, (1, 0, 0): 0, (0, 1, 1): 1,
  (0, 1, 0): 1, (0, 0, 1): 1, (0, 0, 0): 0,
}  # fmt: skip


def scalar(state, num_steps, number):
  """The same, one cell at a time, with the rule's number in binary digits."""
  digits = f"{number:08b}"  # For 111, 110, ..., 000.
  for _ in range(num_steps):
    state = [
      int(digits[7 - (4 * state[i - 1] + 2 * c + state[(i + 1) % len(state)])])
      for i, c in enumerate(state)
    ]
  return state


def random_states(num, width, seed=0):
  return np.random.default_rng(seed).random((num, width)) < 0.5


@pytest.mark.parametrize("neighbourhood", sorted(RULE_110))
def test_rule_110_is_its_table(neighbourhood):
  got = task.evolve(np.array([neighbourhood], bool), 1, 110)
  assert got[0, 1] == RULE_110[neighbourhood]
  assert scalar(list(neighbourhood), 1, 110)[1] == RULE_110[neighbourhood]


@pytest.mark.parametrize("number", [0, 30, 90, 110, 184, 255])
@pytest.mark.parametrize(("num", "width"), [(1, 3), (13, 8), (5, 24), (3, 70)])
def test_states_evolve_as_one_cell_at_a_time(number, num, width):
  states = random_states(num, width)
  for num_steps in (0, 1, 2, 9):
    got = task.evolve(states, num_steps, number)
    assert got.dtype == bool
    rows = states.astype(int).tolist()
    assert got.tolist() == [scalar(row, num_steps, number) for row in rows]


def test_the_ends_are_neighbours():
  lone = np.zeros((1, 10), bool)
  lone[0, 0] = True
  assert np.flatnonzero(task.evolve(lone, 1, 110)[0]).tolist() == [0, 9]
  states = random_states(40, 11)
  turned = task.evolve(np.roll(states, 4, axis=1), 20, 110)
  np.testing.assert_array_equal(
    turned, np.roll(task.evolve(states, 20, 110), 4, axis=1)
  )
  # With zeros beyond the ends the first cell would nearly always be 1.
  assert 0.5 < task.evolve(random_states(4000, 24), 16, 110)[:, 0].mean() < 0.6


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_the_density_of_few_cells_is_exact(num_steps):
  width = 7
  states = [[n >> i & 1 for i in range(width)] for n in range(2**width)]
  ones = sum(scalar(state, num_steps, 110)[0] for state in states)
  assert task.density(width, num_steps, 110) == ones / 2**width


@pytest.mark.long
def test_the_density_of_many_cells_is_close():
  """All 2^24 states: five squarings of the map make 32 steps."""
  state = np.arange(2**24, dtype=np.uint32)
  left = state >> 1 | (state & 1) << 23  # Bit i gets its neighbour i + 1.
  right = state >> 23 | (state << 1 & (2**24 - 1))
  after = (state | right) & ~(left & state & right)
  for _ in range(5):
    after = after[after]
  exact = float(np.mean(after & 1))
  assert task.density(24, 32, 110) == pytest.approx(exact, abs=3e-4)
  # 16 and 17 cells: tests both enumeration and sampling.
  assert task.density(16, 8, 110) == pytest.approx(
    task.density(17, 8, 110), abs=2e-3
  )


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
  assert floor == pytest.approx(0.0995175, abs=2e-4)
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
