"""The command line: one line and exit status 2 for every mistake."""

import json
import os
import subprocess
import sys

import pytest
from tests_support import ROOT


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
    (["--config=configs/sudoku_utm.py:smoke"], "--workdir=DIR is missing"),
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


def test_describe_prints_json_and_trains_nothing():
  done = command("--config=configs/sudoku_utm.py", "--mode=describe")
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
