"""Automata against scalar code and against counting."""

import numpy as np
import pytest

from loopjax.data.automaton import task

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
