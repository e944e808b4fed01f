"""The first cell of the notebooks, on a simulated Colab."""

import configparser
import subprocess
import sys
import types
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tests_support import ROOT, script


@pytest.fixture
def start():
  return script(ROOT / "notebooks" / "start.py")


@pytest.fixture
def colab(start, monkeypatch):
  """A session on Colab; its list records the calls."""
  done = []
  shell = types.SimpleNamespace(
    kernel=types.SimpleNamespace(
      do_shutdown=lambda restart: done.append(("shutdown", restart))
    )
  )
  modules = {
    "google.colab": types.ModuleType("google.colab"),
    "IPython": types.SimpleNamespace(get_ipython=lambda: shell),
  }
  for name, module in modules.items():
    monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.setattr(start, "run", done.append)
  monkeypatch.setattr(sys, "path", list(sys.path))
  return done


def no_such_package(name):
  raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
  ("driver", "extra"),
  [("580.65.06", "[cuda]"), ("550.54.15", "[cuda12]"), (None, "")],
)
def test_it_installs_once_at_the_pinned_versions(
  start, colab, monkeypatch, driver, extra
):
  monkeypatch.setattr(start.shutil, "which", lambda name: driver)
  said = types.SimpleNamespace(stdout=f"{driver}\n")
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
  start.install()  # Here it is installed.
  assert not colab
  monkeypatch.setattr(start.metadata, "version", no_such_package)
  start.install()
  [command] = colab
  assert command[-2:] == ["-e", f"{ROOT}{extra}"]
  assert str(ROOT / "notebooks" / "constraints.txt") in command
  assert sys.path[0] == str(ROOT)


def test_the_installation_shows_what_it_does_and_why_it_fails(start, capsys):
  program = "print('Collecting jax'); print('noise'); raise SystemExit({})"
  start.run([sys.executable, "-c", program.format(0)])
  said = capsys.readouterr().out
  assert "\rCollecting jax" in said and "noise" not in said
  with pytest.raises(RuntimeError, match="noise"):
    start.run([sys.executable, "-c", program.format(1)])


def test_it_restarts_for_another_jax_and_only_then(
  start, colab, monkeypatch, capsys
):
  start.main()
  assert not colab
  assert " x CPU" in capsys.readouterr().out
  old = types.SimpleNamespace(__version__="0.4.1")
  monkeypatch.setitem(sys.modules, "jaxlib", old)
  start.main()
  assert colab == [("shutdown", True)]
  assert "jaxlib" in capsys.readouterr().out


def test_every_dependency_is_pinned_as_it_is_asked_for():
  lines = (ROOT / "notebooks" / "constraints.txt").read_text().splitlines()
  pins = dict(line.split("==") for line in lines if not line.startswith("#"))
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  asked = setup["options"]["install_requires"].strip().splitlines()
  free = {"matplotlib", "numpy", "pandas", "scipy", "tqdm"}  # As on Colab.
  for line in asked:
    wanted = Requirement(line)
    if wanted.marker and not wanted.marker.evaluate({"python_version": "3.12"}):
      continue
    if wanted.name not in free:
      assert Version(pins[wanted.name]) in wanted.specifier, line
