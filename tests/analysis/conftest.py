"""What the tests of figures share."""

import pytest

from loopjax.analysis.plots import draw


@pytest.fixture
def drawn(monkeypatch):
  """Saved figures by file name."""
  saved, save = {}, draw.save

  def keep(figure, path):
    saved[path.name] = figure
    return save(figure, path)  # Warns if layout is impossible.

  monkeypatch.setattr(draw, "save", keep)
  return saved
