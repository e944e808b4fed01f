"""Attention quadrants and shares on handmade maps."""

import numpy as np
import pytest

from loopjax.analysis.plots import maps as plots_maps


def test_quadrants_of_a_known_map():
  # One memory token, two cells.
  one = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.2, 0.4, 0.4]])
  mass = plots_maps.quadrants(one[None, None], 1)
  known = {"sm": 0.4, "ss": 0.6, "mm": 0.2, "ms": 0.8}
  assert mass.keys() == known.keys()
  for name, value in known.items():
    np.testing.assert_allclose(mass[name], [[value]])


def test_rows_of_queries_sum_to_one():
  maps = np.random.default_rng(0).dirichlet(np.ones(7), size=(2, 3, 7))
  mass = plots_maps.quadrants(maps, 3)
  np.testing.assert_allclose(mass["sm"] + mass["ss"], 1.0)
  np.testing.assert_allclose(mass["mm"] + mass["ms"], 1.0)


def test_without_memory_all_mass_is_in_the_sequence():
  maps = np.full((2, 3, 4, 4), 0.25)
  mass = plots_maps.quadrants(maps, 0)
  for name, value in {"sm": 0, "ss": 1, "mm": 0, "ms": 0}.items():
    np.testing.assert_array_equal(mass[name], np.full((2, 3), value))


def test_uniform_attention_puts_mass_by_numbers():
  mass = plots_maps.uniform_quadrants(10, 2)
  assert mass == pytest.approx({"sm": 0.2, "ss": 0.8, "mm": 0.2, "ms": 0.8})
  assert plots_maps.uniform_quadrants(4, 0)["ss"] == pytest.approx(1.0)


def test_shares_of_a_head_that_stays_in_its_row():
  # One memory token and a 2x2 board; coordinates are row and column.
  coordinates = ((0, 0), (0, 1), (1, 0), (1, 1))
  inside = np.kron(np.eye(2), [[0.1, 0.3], [0.3, 0.1]])
  maps = np.full((1, 5, 5), 0.2)
  maps[0, 1:, 1:] = inside
  maps[0, 1:, 0] = 0.6
  share, uniform = plots_maps.coordinate_shares(maps, 1, coordinates)
  # All of its mass is in its row; in its column, only its own.
  np.testing.assert_allclose(share, [[1.0, 0.25]])
  np.testing.assert_allclose(uniform, [0.5, 0.5])


def test_uniform_attention_has_the_expected_share():
  coordinates = [(i // 3, i % 3, 0) for i in range(6)]
  maps = np.full((2, 8, 8), 1 / 8)
  share, uniform = plots_maps.coordinate_shares(maps, 2, coordinates)
  np.testing.assert_allclose(share, np.broadcast_to(uniform, (2, 3)))
  np.testing.assert_allclose(uniform, [1 / 2, 1 / 3, 1.0])


def test_a_head_that_looks_at_memory_alone_gives_no_nan():
  maps = np.zeros((1, 3, 3))
  maps[..., 0] = 1.0
  share, _ = plots_maps.coordinate_shares(maps, 1, ((0,), (1,)))
  np.testing.assert_array_equal(share, [[0.0]])
