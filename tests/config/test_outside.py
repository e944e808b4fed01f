"""Families and tasks from outside the package: the files of docs/howto."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from tests_support import ROOT, command, refused

import loopjax
from loopjax import config as config_lib
from loopjax import train
from loopjax.data import TASKS
from loopjax.generate import __main__ as generate_entry
from loopjax.models import MODELS
from loopjax.protocols import Registry
from loopjax.report import __main__ as report_entry


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
  """A folder with a package that has a family and a task."""
  folder = tmp_path_factory.mktemp("packages")
  package = folder / "outside_package"
  package.mkdir()
  (package / "__init__.py").write_text("")
  for name in ("gated.py", "parity.py"):
    shutil.copy(ROOT / "docs" / "howto" / name, package)
  (package / "empty.py").write_text("")
  return folder


def forget(packages):
  """As in a process that has not read the package, or a folder of it."""
  for registry, name in ((MODELS, "gated"), (TASKS, "parity")):
    if name in registry:
      del registry[name]
  for name in [x for x in sys.modules if x.startswith("outside_package")]:
    del sys.modules[name]
  if str(packages) in sys.path:
    sys.path.remove(str(packages))


def config_of(task):
  MODELS.register("gated", "outside_package.gated")
  TASKS.register("parity", "outside_package.parity")
  config = config_lib.make("gated", task)
  small = {
    "model.width": 16, "model.num_layers": 1, "model.num_heads": 2,
    "model.num_loops": 2, "model.keep_logit": -1.0, "optim.warmup_steps": 2,
    "run.num_steps": 10, "run.batch_size": 8, "run.checkpoint_every": 10,
    "run.log_every": 10, "eval.depth_factor": 0, "eval.batch_size": 8,
  }  # fmt: skip
  if task == "text":
    small |= {
      "task.train_files": "made:arithmetic", "task.sequence_length": 16,
      "task.validation_share": 0.01, "task.test_share": 0.01,
    }  # fmt: skip
  else:
    small |= {"task.length": 8, "task.num_eval_examples": 16}
  config_lib.override(config, small)
  return config


@pytest.fixture(scope="module")
def workdirs(packages, tmp_path_factory):
  """A trained run on text, and one on a task from outside."""
  folder = tmp_path_factory.mktemp("runs")
  sys.path.insert(0, str(packages))
  for task in ("text", "parity"):
    summary = train.run(config_of(task), folder / task, "train_and_eval")
    assert summary["status"] == "completed"
  forget(packages)
  return folder


@pytest.fixture
def installed(packages, monkeypatch):
  """The package can be imported, but nothing is registered."""
  monkeypatch.syspath_prepend(str(packages))
  yield
  forget(packages)


@pytest.fixture
def missing(packages):
  forget(packages)
  yield
  forget(packages)


def test_config_json_has_the_import_path(workdirs):
  config = json.loads((workdirs / "parity" / "config.json").read_text())
  assert config["model"]["name"] == "gated"
  assert config["model"]["module"] == "outside_package.gated"
  assert config["task"]["module"] == "outside_package.parity"
  config = json.loads((workdirs / "text" / "config.json").read_text())
  assert "module" not in config["task"]


def test_a_run_is_read_where_nothing_is_registered(workdirs, installed, capsys):
  path = workdirs / "text"
  flags = ("--prompt=1+2=", "--max_new_tokens=4", "--temperature=0")
  assert command(generate_entry.main, str(path), *flags) == 0
  text = capsys.readouterr().out
  assert text.startswith("1+2=")
  forget(None)
  model = loopjax.load(path)
  assert model.about.settings.model.keep_logit == -1
  again = model.generate("1+2=", max_new_tokens=4, temperature=0)
  assert text.strip() == f"1+2={again}".strip()


def test_its_scores_have_their_names(workdirs, installed, tmp_path):
  path = workdirs / "parity"
  forget(None)
  assert command(report_entry.main, str(path), f"--out={tmp_path}") == 0
  (text,) = [x.read_text() for x in tmp_path.glob("*.md")]
  assert re.search(r"## exact match \S+ on \d+ test", text)


def test_an_entry_point_adds_a_name(packages, tmp_path):
  """In a process of its own, which sees what is installed when it starts."""
  about = tmp_path / "outside-1.0.dist-info"
  about.mkdir()
  (about / "METADATA").write_text("Name: outside\nVersion: 1.0\n")
  (about / "entry_points.txt").write_text(
    "[loopjax.families]\ngated = outside_package.gated\n"
    "[loopjax.tasks]\nparity = outside_package.parity\n"
  )
  says = """
from loopjax import config
made = config.make("gated", "parity")
print(made.model.module, made.task.module)
"""
  done = subprocess.run(
    [sys.executable, "-c", says],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": f"{ROOT}:{packages}:{tmp_path}"},
    check=True,
    capture_output=True,
    text=True,
  )
  assert done.stdout.split() == [
    "outside_package.gated",
    "outside_package.parity",
  ]


def test_entry_points_are_read_for_unknown_names_alone(monkeypatch):
  read = []

  def entry_points(group):
    read.append(group)
    return ()

  monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
  known = Registry("model", "loopjax.families", lambda x: x, {"math": "math"})
  assert known["math"].pi > 3
  known.register("mine", "my.module")
  assert "mine" in known and not read
  for _ in range(2):
    assert "other" not in known
  assert read == ["loopjax.families"]


def test_a_module_that_cannot_be_imported_is_one_line(workdirs, missing):
  message = (
    "model.name='gated': its module outside_package.gated cannot be imported "
    ".*No module named.*; install .* or add its folder to PYTHONPATH"
  )
  with refused(message):
    loopjax.load(workdirs / "text")


def test_a_module_without_a_family_is_one_line(installed):
  MODELS.register("gated", "outside_package.empty")
  with refused(
    "model.name='gated': outside_package.empty has no FAMILY; it mus"
  ):
    config_lib.make("gated", "text")
  TASKS.register("parity", "outside_package.empty")
  with refused(
    "'parity': outside_package.empty does not define Config, TRACES"
  ):
    config_lib.make("looped", "parity")


def test_a_name_has_one_module(installed):
  for _ in range(2):  # A config file may be executed more than once.
    MODELS.register("gated", "outside_package.gated")
  with refused("'gated' is other.module here, but the name is taken"):
    MODELS.register("gated", "other.module")
  with refused("'utm' is other.module here, but the name is taken"):
    MODELS.register("utm", "other.module")
  config = config_lib.make("gated", "text")
  config.model.module = "other.module"
  with refused("model.module is not outside_package.gated"):
    config_lib.resolve(config)
