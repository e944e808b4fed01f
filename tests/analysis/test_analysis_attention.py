"""Attention quadrants and shares on handmade maps."""

import numpy as np
import pytest

from loopjax.analysis.plots import maps as plots_maps

# One memory token, two cells; their mass on memory, and on cells.
_ONE = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.2, 0.4, 0.4]])


@pytest.mark.parametrize(
  ("maps", "num_memory", "expected"),
  [
    (_ONE, 1, {"sm": 0.4, "ss": 0.6, "mm": 0.2, "ms": 0.8}),
    (_ONE, 0, {"sm": 0.0, "ss": 1.0, "mm": 0.0, "ms": 0.0}),
    (
      np.full((10, 10), 0.1), 2, {"sm": 0.2, "ss": 0.8, "mm": 0.2, "ms": 0.8},
    ),
  ],
)  # fmt: skip
def test_quadrants_of_a_known_map(maps, num_memory, expected):
  mass = plots_maps.quadrants(np.stack([maps, maps])[:, None], num_memory)
  assert mass.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(mass[name], [[value]] * 2)
  if np.ptp(maps) == 0.0:
    uniform = plots_maps.uniform_quadrants(len(maps), num_memory)
    assert uniform == pytest.approx(expected)


def test_shares_of_a_head_that_stays_in_its_row():
  # One memory token and a 2x2 board; coordinates are row and column.
  coordinates = ((0, 0), (0, 1), (1, 0), (1, 1))
  maps = np.full((3, 5, 5), 0.2)
  maps[0, 1:, 1:] = np.kron(np.eye(2), [[0.1, 0.3], [0.3, 0.1]])
  maps[0, 1:, 0] = 0.6
  maps[2] = np.eye(5)[[0] * 5]  # Looks at memory alone.
  share, uniform = plots_maps.coordinate_shares(maps, 1, coordinates)
  # All of its mass is in its row; in its column, only its own.
  np.testing.assert_allclose(share, [[1.0, 0.25], [0.5, 0.5], [0.0, 0.0]])
  np.testing.assert_allclose(uniform, [0.5, 0.5])
