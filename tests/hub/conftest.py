"""Fixtures of tests that train imported models."""

import pytest


@pytest.fixture
def text(tmp_path):
  """One plain file, of one paragraph."""
  path = tmp_path / "mine.txt"
  path.write_text(" ".join(f"w{i % 7} w{i % 11}" for i in range(1500)))
  return path
