"""Fixtures shared by the tests of the launch scripts."""

import pytest
from launch_support import World


@pytest.fixture
def world(tmp_path):
  return World(tmp_path / "bin")
