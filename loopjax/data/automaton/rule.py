"""Elementary cellular automata on a ring, many at once.

A rule is a number below 256: its bit 4 l + 2 c + r is the next value of a cell
c between the neighbours l and r (Cook 2004). Bitwise operations treat bits
independently, so one byte holds the same cell of eight states.
"""

import functools

import numpy as np

# Up to this width all states are counted, beyond it a sample.
_MAX_EXACT_WIDTH = 16
_NUM_SAMPLED = 2**18


def evolve(states: np.ndarray, num_steps: int, rule: int) -> np.ndarray:
  """Applies a rule to states on a ring: the ends are neighbours.

  Args:
    states: bool [N, W].
    num_steps: t >= 0.
    rule: number of the rule, 0 to 255.

  Returns:
    The states after t steps, bool [N, W].
  """
  cells = np.packbits(states.T, axis=1)
  cells = _evolve_packed(cells, num_steps, rule)
  return np.unpackbits(cells, axis=1, count=len(states)).T.astype(bool)


@functools.cache
def density(width: int, num_steps: int, rule: int) -> float:
  """The share of ones after t steps from uniform states of W cells.

  All cells of a ring are equivalent, so this is the probability of each. It is
  exact up to 16 cells, and beyond estimated on a fixed sample of 2^18 states.
  """
  if width <= _MAX_EXACT_WIDTH:
    numbers = np.arange(2**width)
    cells = np.packbits(numbers >> np.arange(width)[:, None] & 1, axis=1)
    count = len(numbers)
  else:
    count = _NUM_SAMPLED
    cells = np.random.default_rng(0).integers(
      256, size=(width, count // 8), dtype=np.uint8
    )
  cells = _evolve_packed(cells, num_steps, rule)
  ones = np.unpackbits(cells, axis=1, count=count)
  return float(ones.mean())


def _evolve_packed(cells: np.ndarray, num_steps: int, rule: int) -> np.ndarray:
  """`evolve` on uint8 [W, ceil(N / 8)]: row i has cell i of every state."""
  for _ in range(num_steps):
    left, right = np.roll(cells, 1, axis=0), np.roll(cells, -1, axis=0)
    values = [(~cell, cell) for cell in (left, cells, right)]
    cells = np.zeros_like(cells)
    for neighbourhood in range(8):
      if rule >> neighbourhood & 1:
        bits = neighbourhood >> 2 & 1, neighbourhood >> 1 & 1, neighbourhood & 1
        is_l, is_c, is_r = (v[b] for v, b in zip(values, bits, strict=True))
        cells |= is_l & is_c & is_r
  return cells
