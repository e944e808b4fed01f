"""The command line: one line and exit status 2 for every mistake."""

import json
import os
import subprocess
import sys
import warnings

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from tests_support import ROOT

from loopjax import main as main_lib
from loopjax import train
from loopjax.run import machine


def command(*arguments, **environment):
  return subprocess.run(
    [sys.executable, "-m", "loopjax.main", *arguments],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", **environment},
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "--config=FILE is missing"),
    (["--config=configs/nothing.py"], "nothing.py"),
    (["--config=configs/sudoku_utm.py:huge"], "error: no preset 'huge'"),
    (
      ["--config=configs/sudoku_utm.py:smoke,model.widht=3"],
      "error: no setting 'model.widht'; there is model.width",
    ),
    (
      ["--config=configs/sudoku_utm.py:smoke", "--config.model.witdh=3"],
      "error: 'witdh' Did you mean \"width\"",
    ),
    (
      ["--config=configs/sudoku_utm.py:smoke", "--config.model.width=wide"],
      "wide",
    ),
    (["--config=configs/sudoku_utm.py:smoke", "--mode=dance"], "dance"),
    (["--konfig=x"], "konfig"),
    (["--config=configs/sudoku_utm.py:smoke", "mode=eval"], "'mode=eval'"),
  ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
  done = command(*arguments)
  assert done.returncode == 2, done.stderr
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: ")
  assert message in done.stderr


def test_mistakes_in_the_run_are_one_line_and_write_nothing(tmp_path):
  workdir = tmp_path / "run"
  done = command(
    "--config=configs/sudoku_utm.py:smoke",
    f"--workdir={workdir}",
    "--config.run.batch_size=15",
    JAX_NUM_CPU_DEVICES="2",
  )
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert "run.batch_size=15" in done.stderr
  assert not workdir.exists()


@pytest.fixture
def main(monkeypatch, tmp_path):
  """What the command does with flags, in this process and a new directory."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  least = jax.config.jax_persistent_cache_min_compile_time_secs

  @flagsaver.flagsaver
  def main(*arguments):
    with warnings.catch_warnings():  # ml_collections loads files the old way.
      warnings.simplefilter("ignore", DeprecationWarning)
      flags.FLAGS(["main", *arguments])
    return main_lib.main([])

  yield main
  jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


BARE = "--config=configs/sudoku_utm.py"


def test_a_config_is_all_that_a_run_needs(main, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(machine, "matrix_rate", lambda: 160e9)
  monkeypatch.setattr(machine, "_MEASURED_SECONDS", 0.0)
  assert main(f"{BARE}:smoke", "--mode=train") == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "work directory: runs/sudoku_utm-smoke"
  assert lines[1].startswith("preset: smoke; others: --config=configs/sudoku_u")
  assert {":gpu,", ":tiny,", ":nine"} <= set(lines[1].split())
  assert lines[2].startswith("time: about 0 s of training")
  assert sum("steps a second; about" in line for line in lines) == 1
  assert (tmp_path / "runs" / "sudoku_utm-smoke" / "summary.json").exists()
  assert main(f"{BARE}:smoke", "--mode=train") == 0
  said = capsys.readouterr().out
  assert said.endswith("runs/sudoku_utm-smoke is complete already\n")


def test_a_run_that_was_stopped_says_how_to_go_on(main, monkeypatch, capsys):
  asked = []

  def run(config, workdir, mode):
    asked.append((config.task.box_cols, str(workdir), mode))
    return {"status": "preempted", "steps": 600, "command": "python -m x --y"}

  monkeypatch.setattr(train, "run", run)
  assert main(BARE) == 4
  assert asked == [(3, "runs/sudoku_utm", "train_and_eval")]
  said = capsys.readouterr()
  assert said.out.splitlines()[1].startswith("preset: tiny; others: ")
  assert said.err == (
    "stopped after step 600 of 2600; this goes on: python -m x --y\n"
  )


def test_describe_prints_json_and_trains_nothing():
  done = command("--config=configs/sudoku_utm.py:paper", "--mode=describe")
  assert done.returncode == 0, done.stderr
  described = json.loads(done.stdout)
  assert described["parameters"] == 3_177_612
  assert described["config"]["model"]["name"] == "utm"
  assert len(described["flops_per_example"]) == 18
  assert described["cache_bytes_per_token"] == 0


FULL_DISK = """
import errno, os, threading
from loopjax import command_line

def fill():
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def entry(argv):
  threads = [threading.Thread(target=fill) for _ in range(8)]
  for thread in threads: thread.start()
  for thread in threads: thread.join()
  fill()

command_line.run(entry)
"""


def test_a_disk_that_is_full_for_many_threads_is_one_line():
  done = subprocess.run(
    [sys.executable, "-c", FULL_DISK, "--workdir=runs/full"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr == "error: --workdir=runs/full: No space left on device\n"
