"""What there is to train."""

import pytest
from tests_support import CONFIGS, ROOT, namespace

import loopjax
from loopjax.commands import listing
from loopjax.run import machine


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
  monkeypatch.setattr(machine, "matrix_rate", lambda: 160e9)


def test_every_preset_of_every_config_is_listed(monkeypatch):
  monkeypatch.chdir(ROOT)
  _, *paragraphs = listing.listing().split("\n\nconfigs/")
  assert [p.partition(".py: ")[0] for p in paragraphs] == CONFIGS
  for name, paragraph in zip(CONFIGS, paragraphs, strict=True):
    for preset in namespace(name)["PRESETS"]:
      assert f"\n  :{preset:6} " in paragraph
  assert max(len(line) for line in listing.listing().splitlines()) <= 80


def test_a_preset_says_what_it_takes_here_and_what_it_is(monkeypatch):
  monkeypatch.chdir(ROOT)
  lines = listing.listing().partition("configs/sudoku_utm.py")[2].splitlines()
  assert lines[0].startswith(": UTM on Sudoku: memory tokens")
  tiny, paper = (
    next(line for line in lines if line.startswith(f"  :{name}"))
    for name in ("tiny", "paper")
  )
  assert tiny.startswith("  :tiny   4 minutes here. 6x6 boards")
  assert "days here. 59,872 steps" in paper


def test_paths_are_those_to_give_from_here(monkeypatch, tmp_path):
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  monkeypatch.chdir(ROOT / "docs")
  assert "\n../configs/sudoku_utm.py: " in listing.listing()


def test_an_installed_package_has_no_configs(monkeypatch, tmp_path):
  installed = tmp_path / "site-packages" / "loopjax" / "__init__.py"
  monkeypatch.setattr(loopjax, "__file__", str(installed))
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  other = "import torch\n\nraise ImportError\n\ndef get_config():\n  pass\n"
  (tmp_path / "configs" / "other.py").write_text(other)
  said = listing.listing()
  assert "in the folder configs/ of the loopjax repository" in said
  assert ".py: " not in said
  # Unless it runs beside them.
  for name in ("common", "sudoku_utm"):
    text = (ROOT / "configs" / f"{name}.py").read_text()
    (tmp_path / "configs" / f"{name}.py").write_text(text)
  assert "\nconfigs/sudoku_utm.py: " in listing.listing()
