"""The listing of configs and commands."""

from importlib import metadata

import pytest
from tests_support import CONFIGS, ROOT, namespace, refused

import loopjax
from loopjax import sections
from loopjax.commands import describe
from loopjax.config import presets


def test_every_preset_of_every_config_is_listed(monkeypatch):
  monkeypatch.chdir(ROOT)
  _, *paragraphs = describe.listing().split("\n\nconfigs/")
  assert [p.partition(".py: ")[0] for p in paragraphs] == CONFIGS
  for name, paragraph in zip(CONFIGS, paragraphs, strict=True):
    for preset in namespace(name)["PRESETS"]:
      assert f"\n  :{preset:8} " in paragraph
  assert max(len(line) for line in describe.listing().splitlines()) <= 80


def test_a_preset_says_what_it_is(monkeypatch):
  monkeypatch.chdir(ROOT)
  lines = describe.listing().partition("configs/sudoku_utm.py")[2].splitlines()
  assert lines[0].startswith(": UTM on Sudoku: memory tokens")
  tiny = next(line for line in lines if line.startswith("  :tiny"))
  assert tiny.startswith("  :tiny     6x6 boards, 5 minutes on 2 CPU cores ")


@pytest.mark.parametrize(
  ("number", "text"),
  [(999, "999 "), (1_234_567, "1.23 M"), (999_600, "1 M"), (0.5e12, "500 G")],
)
def test_costs_have_a_unit_and_no_exponent(number, text):
  assert describe._short(number) == text


def test_a_config_of_the_user_is_listed_with_what_it_has(monkeypatch, tmp_path):
  """Without a docstring or presets, and with python -OO, too."""
  monkeypatch.setattr(presets, "folder", lambda: tmp_path)
  (tmp_path / "a_bare.py").write_text("def get_config(arg=''): pass\n")
  text = '"""Mine.\n\n  tiny    small.\n"""\n'
  (tmp_path / "b_mine.py").write_text(text)
  monkeypatch.setattr(presets, "read", lambda path: {"__doc__": None})
  *_, bare, mine = describe.listing().split("\n\n")
  assert (bare, mine) == ("configs/a_bare.py:", "configs/b_mine.py: Mine.")


def test_a_config_that_fails_is_named_by_the_listing(monkeypatch, tmp_path):
  monkeypatch.setattr(presets, "folder", lambda: tmp_path)
  file = tmp_path / "a_broken.py"
  for text in ("import nothing_here", "def get_config(:"):
    file.write_text(text)
    with refused(f"--config: {file}"):
      describe.listing()


@pytest.mark.parametrize("place", ["", "site-packages"])
def test_a_wheel_has_the_configs(place, monkeypatch, tmp_path):
  """In a checkout, where an installation recorded them, or below --target."""
  assert presets.folder() == ROOT / "configs"
  installed = tmp_path / "site-packages" / "loopjax" / "__init__.py"
  monkeypatch.setattr(loopjax, "__file__", str(installed))
  folder = tmp_path / place / "share" / "loopjax" / "configs"
  folder.mkdir(parents=True)
  for name in ("common", "sudoku_utm"):
    text = (ROOT / "configs" / f"{name}.py").read_text()
    (folder / f"{name}.py").write_text(text)
  places = [
    metadata.PackagePath(x)
    for x in ("loopjax/main.py", "../share/loopjax/configs/common.py")
  ]
  for place in places:
    place.dist = metadata.PathDistribution(tmp_path / "site-packages" / "x")
  monkeypatch.setattr(metadata, "files", {"loopjax": places}.get)
  assert presets.folder() == folder
  assert "\nconfigs/sudoku_utm.py: " in describe.listing()
  monkeypatch.chdir(tmp_path)
  there = f"{folder}/sudoku_utm.py"
  assert presets.located("sudoku_utm:nine,x=1") == f"{there}:nine,x=1"
  assert presets.located("configs/sudoku_utm.py") == there


def test_own_files_go_before_those_of_loopjax(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  known = str(ROOT / "configs" / "sudoku_utm.py")
  assert presets.located("configs/sudoku_utm.py") == known
  assert presets.located("sudoku_utm") == known
  for other in ("mine/sudoku_utm.py", "sudoku_utm.py", "configs/other.py"):
    assert presets.located(other) == other
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "sudoku_utm.py").write_text("")
  assert presets.located("configs/sudoku_utm.py") == "configs/sudoku_utm.py"
  assert presets.located("sudoku_utm") == known


def test_a_folder_may_have_a_colon_in_its_name(monkeypatch, tmp_path):
  """As of a time; an argument may end as a config's file does."""
  there = tmp_path / "12:30"
  there.mkdir()
  monkeypatch.setattr(presets, "folder", lambda: there)
  (there / "mine.py").write_text("")
  assert presets.located("mine:a=x.py") == f"{there}/mine.py:a=x.py"
  assert sections.split_name(f"{there}/mine.py:a=1:2,b=x.py") == (
    f"{there}/mine.py",
    "a=1:2,b=x.py",
  )
  assert sections.split_name(f"{there}/mine.py") == (f"{there}/mine.py", "")
  assert sections.split_name("mine:a=b/x.py") == ("mine", "a=b/x.py")
