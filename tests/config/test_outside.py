"""Families and tasks from outside the package: the files of docs/howto."""

import json
import re
import shutil
import sys

import pytest
from tests_support import ROOT, command, refused

import loopjax
from loopjax import config as config_lib
from loopjax import main, train
from loopjax.config import sources
from loopjax.data import TASKS
from loopjax.generate import __main__ as generate_entry
from loopjax.models import MODELS
from loopjax.report import __main__ as report_entry

FAMILY, TASK = "outside_package.gated", "outside_package.parity"


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
  MODELS._entries.pop(FAMILY, None)
  TASKS._entries.pop(TASK, None)
  for name in [x for x in sys.modules if x.startswith("outside_package")]:
    del sys.modules[name]
  if str(packages) in sys.path:
    sys.path.remove(str(packages))


def config_of(task):
  config = config_lib.make(FAMILY, task)
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
  for name, task in (("text", "text"), ("parity", TASK)):
    summary = train.run(config_of(task), folder / name, "train_and_eval")
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
  assert config["model"]["name"] == FAMILY
  assert config["task"]["name"] == TASK


def test_a_run_is_read_in_another_process(workdirs, installed, capsys):
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


def test_an_edited_source_is_said_wherever_its_run_is_read(
  workdirs, installed, packages, tmp_path, capsys
):
  """Its scores would be of another model."""
  source = packages / "outside_package" / "gated.py"
  kept = workdirs / "parity" / "sources" / "outside_package"
  before = source.read_text()
  assert (kept / "gated.py").read_text() == before
  assert (kept / "parity.py").exists()
  model = loopjax.load(workdirs / "parity")
  loopjax.save(model, tmp_path / "saved")
  assert "changed" not in capsys.readouterr().err
  source.write_text(before.replace("sigmoid", "tanh"))
  try:
    for run in (workdirs / "parity", tmp_path / "saved"):
      loopjax.load(run)
      line = (
        f"note: {run}: outside_package/gated.py changed since the run began"
      )
      assert line in capsys.readouterr().err
    train.run(config_of(TASK), workdirs / "parity", "train_and_eval")
  finally:
    source.write_text(before)
  assert (kept / "gated.py").read_text() == before


def test_a_recorded_config_trains_the_same_model(
  workdirs, installed, tmp_path, capsys
):
  """Bit for bit, from the run's own config.json."""
  entry = f"--config={workdirs / 'parity' / 'config.json'}"
  assert command(main.main, entry) == 2
  assert "--workdir=DIR is missing" in capsys.readouterr().err
  assert command(main.main, entry, f"--workdir={tmp_path / 'again'}") == 0
  first, again = (
    json.loads((run / "summary.json").read_text())["digest"]
    for run in (workdirs / "parity", tmp_path / "again")
  )
  assert first == again


def test_its_scores_have_their_names(workdirs, installed, tmp_path):
  path = workdirs / "parity"
  forget(None)
  assert command(report_entry.main, str(path), f"--out={tmp_path}") == 0
  (text,) = [x.read_text() for x in tmp_path.glob("*.md")]
  assert re.search(r"## exact match \S+ on \d+ test", text)


def test_a_module_that_is_missing_is_one_line(workdirs, missing):
  with refused(
    f"model.name='{FAMILY}' is not one of .*, nor a module that can"
  ):
    loopjax.load(workdirs / "text")


def test_a_module_that_fails_is_one_line(installed, packages):
  (packages / "outside_package" / "broken.py").write_text("import nowhere\n")
  with refused("model.name='outside_package.broken': No module named 'nowhere"):
    config_lib.make("outside_package.broken", "text")


def test_a_module_without_a_family_is_one_line(installed):
  empty = "outside_package.empty"
  with refused(f"model.name='{empty}': {empty} has no FAMILY; it must"):
    config_lib.make(empty, "text")
  with refused(f"task.name='{empty}': {empty} does not define Config, TRACES"):
    config_lib.make("looped", empty)


def test_a_name_is_not_imported_to_be_refused(installed):
  assert FAMILY in MODELS and FAMILY not in MODELS._entries
  assert "utm_" not in MODELS and "" not in MODELS and None not in MODELS
  with refused("model.name='lopped' is not one of .* did you mean 'looped'"):
    config_lib.make("lopped", "text")


OPTIMIZER = """
import optax

def lion(config):
  return optax.scale_by_lion(config.b1, config.b2)

def flat(config, num_steps):
  return lambda step: config.learning_rate
"""


def test_only_training_needs_a_run_s_own_optimizer(
  tmp_path, monkeypatch, capsys
):
  """Its parameters are loaded, scored and saved without the module."""
  (tmp_path / "its_optimizer.py").write_text(OPTIMIZER)
  config = config_lib.make("looped", "arithmetic")
  config_lib.override(config, {
    "model.width": 16, "model.num_layers": 1, "model.num_heads": 2,
    "model.num_loops": 2, "run.num_steps": 2, "run.batch_size": 8,
    "run.checkpoint_every": 2, "run.log_every": 2, "eval.depth_factor": 0,
    "eval.batch_size": 8, "task.num_eval_examples": 40,
    "run.steps_per_call": 1,
    "optim.name": "its_optimizer:lion", "optim.schedule": "its_optimizer:flat",
  })  # fmt: skip
  monkeypatch.syspath_prepend(str(tmp_path))
  run = tmp_path / "run"
  train.run(config, run, "train")
  assert (run / "sources" / "its_optimizer.py").exists()
  monkeypatch.undo()
  sys.modules.pop("its_optimizer")
  assert command(main.main, "--mode=eval", f"--workdir={run}") == 0
  model = loopjax.load(run)
  data = loopjax.datasets(model)
  assert model.evaluate(data["validation"])["loss"] > 0
  loopjax.save(model, tmp_path / "saved")
  with refused("No module named 'its_optimizer'; .* a copy in RUN/sources"):
    model.fit(data["train"], steps=1)
  config.optim.name = "optax:scale_by_lion"
  config.optim.schedule, config.optim.warmup_steps = "constant", 0
  with refused("optim.name='optax:scale_by_lion': TypeError"):
    train.run(config, tmp_path / "mistaken", "train")
  assert not (tmp_path / "mistaken" / "config.json").exists()
  config.optim.name = "optax:identity"
  assert not sources.files(config_lib.to_dict(config))
  config.optim.name = "builtins:len"
  assert not sources.files(config_lib.to_dict(config))
