"""Sweeps: directory names, skipping, going on, failing."""

import json
import os
import subprocess
import sys

import pytest
from tests_support import ROOT, load_config, namespace, smoke

from loopjax import config as config_lib
from loopjax import sweep
from loopjax import workdir as workdir_lib
from loopjax.errors import UserError

PRESETS = ["", "gpu", "tiny", "smoke"]


def items_of(name, preset="smoke", common=None):
  sweeps = namespace("sudoku_utm")["sweeps"]
  config = load_config("sudoku_utm", preset)
  config_lib.override(config, common or {})
  return sweep.make_items(config, sweeps, name, common or {})


class Runner:
  """Stands in for processes: writes what a run writes, or fails."""

  def __init__(self, items, fail=None):
    self.configs = {item.slug: item.config for item in items}
    self.fail = fail or {}
    self.commands = []

  def __call__(self, command, log):
    self.commands.append(command)
    directory = log.parent / command[-1].rpartition("/")[2]
    log.write_text("what it said\n")
    if directory.name in self.fail:
      return self.fail[directory.name]
    directory.mkdir(exist_ok=True)
    config = self.configs[directory.name]
    workdir_lib.write_json(directory / "config.json", config)
    summary = {
      "status": "completed",
      "metrics": {"eval/exact_match": 0.25},
      "wall_seconds": 7.0,
    }
    workdir_lib.write_json(directory / "summary.json", summary)
    return 0, ""

  @property
  def names(self):
    return [command[-1].rpartition("/")[2] for command in self.commands]


@pytest.fixture
def items():
  return items_of("tradeoff")


def start(monkeypatch, items, tmp_path, fail=None, **options):
  runner = Runner(items, fail)
  monkeypatch.setattr(sweep, "run_command", runner)
  failed = sweep.run_items(items, tmp_path, ["--config=c.py:smoke"], **options)
  return runner, failed


@pytest.mark.parametrize("preset", PRESETS)
def test_all_items_resolve_and_names_mean_one_experiment(preset):
  sweeps = namespace("sudoku_utm")["sweeps"]
  by_slug, by_config = {}, {}
  for name in sweeps(load_config("sudoku_utm", preset)):
    for item in items_of(name, preset):
      assert by_slug.setdefault(item.slug, item.config) == item.config
      key = json.dumps(item.config, sort_keys=True)
      by_config.setdefault(key, set()).add(item.slug.partition(",seed")[0])
      assert "/" not in item.slug
      assert len(item.slug) < 200
  assert all(len(slugs) == 1 for slugs in by_config.values())


def test_slugs_are_stable():
  slugs = [item.slug for item in items_of("memory_curve", "tiny")]
  assert slugs[:2] == [
    "num_memory_tokens=0,seed=0",
    "num_memory_tokens=0,seed=42",
  ]
  assert "seed=0" in slugs  # The preset's own number of tokens.
  assert [item.slug for item in items_of("memory_curve", "tiny")] == slugs


def slug_of(**overrides):
  overrides = {k.replace("__", "."): v for k, v in overrides.items()}
  config = smoke()
  base = config_lib.to_dict(config)
  config_lib.override(config, overrides)
  return sweep.slug(base, config_lib.to_dict(config), list(overrides))


def test_different_changes_have_different_slugs():
  slugs = [
    slug_of(),
    slug_of(run__seed=1),
    slug_of(run__batch_size=8),
    slug_of(eval__batch_size=8),
    slug_of(task__train_csv="a/b"),
    slug_of(task__train_csv="a b"),
    slug_of(task__train_csv="a,seed=1"),
    slug_of(task__train_csv="a", run__seed=1),
    slug_of(task__train_csv="a" * 300),
    slug_of(task__train_csv="a" * 301),
  ]
  assert len(set(slugs)) == len(slugs)
  assert slugs[0] == "base"
  assert slugs[2] == "run.batch_size=8"
  assert all("/" not in slug and len(slug) <= 200 for slug in slugs)


def test_every_item_is_run_with_its_overrides(monkeypatch, items, tmp_path):
  runner, failed = start(monkeypatch, items, tmp_path)
  assert failed == {}
  assert runner.names == [item.slug for item in items]
  command = runner.commands[0]
  assert command[:4] == [
    sys.executable,
    "-m",
    "loopjax.main",
    "--config=c.py:smoke",
  ]
  assert "--config.model.num_memory_tokens=8" in command
  assert f"--workdir={tmp_path / items[0].slug}" == command[-1]


def test_complete_is_skipped_and_unfinished_goes_on(
  monkeypatch, items, tmp_path, capsys
):
  start(monkeypatch, items, tmp_path)
  (tmp_path / items[1].slug / "summary.json").unlink()
  path = tmp_path / items[2].slug / "summary.json"
  workdir_lib.write_json(path, {"status": "diverged"})
  # What does not change the parameters does not matter.
  path = tmp_path / items[3].slug / "config.json"
  config = workdir_lib.read_json(path)
  config["eval"]["batch_size"] = 5
  workdir_lib.write_json(path, config)
  capsys.readouterr()
  runner, failed = start(monkeypatch, items, tmp_path)
  assert failed == {}
  assert runner.names == [items[1].slug, items[2].slug]
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(items)
  assert lines[0].startswith(f"1/4  {items[0].slug}  complete")
  assert "exact match 25.0 %" in lines[0]
  assert "7 s" in lines[0]


def test_failures_are_named_and_the_rest_is_run(monkeypatch, items, tmp_path):
  other = tmp_path / items[3].slug
  other.mkdir()
  config = {**items[3].config, "optim": {"learning_rate": 1.0}}
  workdir_lib.write_json(other / "config.json", config)
  runner, failed = start(
    monkeypatch,
    items,
    tmp_path,
    fail={
      items[0].slug: (2, "error: task.train_csv is wrong"),
      items[1].slug: (3, ""),
      items[2].slug: (-9, "half a line"),
    },
  )
  assert runner.names == [item.slug for item in items[:3]]
  assert failed[items[0].slug] == "task.train_csv is wrong"
  assert "diverged" in failed[items[1].slug]
  assert "exit status -9: half a line" in failed[items[2].slug]
  assert "optim.learning_rate" in failed[items[3].slug]
  assert all("\n" not in message for message in failed.values())


def test_a_process_that_leaves_no_summary_has_failed(
  monkeypatch, items, tmp_path
):
  _, failed = start(
    monkeypatch, items, tmp_path, fail={items[0].slug: (0, "bye")}
  )
  assert list(failed) == [items[0].slug]


def test_limit_counts_what_is_started(monkeypatch, items, tmp_path):
  runner, _ = start(monkeypatch, items, tmp_path, limit=1)
  assert runner.names == [items[0].slug]
  runner, _ = start(monkeypatch, items, tmp_path, limit=2)
  assert runner.names == [items[1].slug, items[2].slug]


def test_the_log_keeps_all_and_the_last_line_is_of_the_last_run(tmp_path):
  log = tmp_path / "x.log"
  script = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))"
  command = [sys.executable, "-c", script]
  assert sweep.run_command([*command, "first", "2"], log) == (2, "first")
  assert sweep.run_command([sys.executable, "-c", ""], log) == (0, "")
  assert log.read_text() == "first\n"


def test_mistakes():
  with pytest.raises(UserError, match="there are ablation, depth, fixed_depth"):
    items_of("depht")
  with pytest.raises(UserError, match="--config.run.seed has no effect"):
    items_of("tradeoff", common={"run.seed": 3})
  with pytest.raises(UserError, match="sweep fixed_depth, item .*epsilon"):
    items_of("fixed_depth", common={"model.epsilon": 0.2})


def test_a_missing_config_file_is_named():
  done = command("--config=configs/nothing.py", "--sweep=depth", "--workdir=x")
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert "configs/nothing.py" in done.stderr


def command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "loopjax.sweep", *arguments],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=300,
  )


CONFIG = "--config=configs/sudoku_utm.py:smoke"


def test_a_dry_run_writes_nothing(tmp_path):
  workdir = tmp_path / "sweep"
  done = command(
    CONFIG,
    "--sweep=depth",
    f"--workdir={workdir}",
    "--dry_run",
    "--config.model.width=32",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("would run") == 3
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--sweep=depth"], "--workdir=DIR are needed"),
    (["--sweep=depht", "--workdir=x"], "no such sweep; there are ablation"),
    (["--sweep=depth", "--workdir=setup.cfg/x"], "cannot be written"),
  ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message):
  done = command(CONFIG, *arguments)
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert message in done.stderr


def test_the_manifest_says_what_was_planned(items, tmp_path):
  sweep.write_manifest(tmp_path / "new", "tradeoff", "c.py:smoke", {}, items)
  manifest = workdir_lib.read_json(tmp_path / "new" / "sweep-tradeoff.json")
  assert manifest["sweep"] == "tradeoff"
  assert manifest["config"] == "c.py:smoke"
  assert manifest["model"] == "utm"
  assert manifest["items"] == [
    {"overrides": item.overrides, "directory": item.slug} for item in items
  ]
