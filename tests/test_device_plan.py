"""The plan for a GPU, rehearsed on a CPU at toy sizes."""

import io
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import time

import pytest
from tests_support import ROOT

DEVICE = ROOT / "benchmarks" / "device"
EXPERIMENTS = (
  "disco", "utm", "melt", "depo", "rule_110", "checks", "steps", "decode",
  "presets",
)  # fmt: skip


def plan(action, runs, *more):
  """What an action prints, and the rows of the record after it."""
  done = subprocess.run(
    [sys.executable, DEVICE / "plan.py", action, f"--runs={runs}", *more],
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=280,
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
  file = runs / "results.jsonl"
  text = file.read_text() if file.exists() else ""
  return done.stdout, [json.loads(line) for line in text.splitlines()]


def test_the_list_is_that_of_the_plan(tmp_path):
  printed, _ = plan("list", tmp_path)
  names = [line.split()[:2] for line in printed.splitlines()]
  assert names == [[name, "open"] for name in EXPERIMENTS]


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_at_toy_size(name, tmp_path):
  _, (row,) = plan("next", tmp_path, "--toy", "--only", name)
  assert (row["experiment"], row["status"]) == (name, "done"), row
  assert row["versions"]["jax"] and row["cpus"] and row["commands"]
  ran = [found for found in row["found"].values() if found]
  runs = [found for found in ran if isinstance(found, dict)]
  assert all(
    run["status"] == "completed" and run["metrics"]
    for run in runs
    if run["status"] != "open"
  )
  for line in (line for rows in ran if isinstance(rows, list) for line in rows):
    assert "error" not in line and line.get("ok", True), line
  assert any(run["status"] == "completed" for run in runs) or ran != runs


# A run of some steps; b's first start waits to be stopped.
FAKE = """\
import json, pathlib, random, signal, sys, time

def save(step):
  saved = folder / "checkpoints" / str(step)
  saved.mkdir(parents=True)
  (saved / "weights").write_bytes(random.Random(step).randbytes(9999))

def stop(*_):
  save(first + 2)
  sys.exit(4)

signal.signal(signal.SIGTERM, stop)
folder = pathlib.Path(sys.argv[1].removeprefix("--workdir="))
folder.mkdir(parents=True, exist_ok=True)
steps = [int(path.name) for path in folder.glob("checkpoints/[0-9]")]
first = max(steps, default=0)
save(first + 1)
(folder / "checkpoints" / "9.partial").mkdir(exist_ok=True)
(folder / "config.json").write_text("{}")
while folder.name == "b" and not first:
  time.sleep(0.01)
summary = {"status": "completed", "metrics": {"first": first}}
(folder / "summary.json").write_text(json.dumps(summary))
"""
PLAN = """\
# A plan

## 1. long: is stopped

    python FAKE --workdir=runs/plan/a
    python FAKE --workdir=runs/plan/b

## 2. short: runs after it

    python FAKE --workdir=runs/plan/c

    python FAKE --workdir=runs/plan/d

## 3. wrong: fails

    python -c 'print("what is wrong"); exit(1)'

    python FAKE --workdir=runs/plan/e
"""


@pytest.fixture
def act(tmp_path, monkeypatch, capsys):
  """Runs the program with a quick plan; returns (status, new rows, printed)."""
  (tmp_path / "fake.py").write_text(FAKE)
  text = PLAN.replace("FAKE", str(tmp_path / "fake.py"))
  (tmp_path / "PLAN.md").write_text(text)
  module = runpy.run_path(str(DEVICE / "plan.py"))
  main = module["main"]
  monkeypatch.setitem(main.__globals__, "install", lambda: None)
  monkeypatch.setattr("signal.signal", lambda *_: None)
  begun = tmp_path / "runs/a/summary.json", tmp_path / "runs/b/config.json"

  class Clock:
    """Says that the time is over as soon as b waits."""

    sleep, strftime, left = time.sleep, time.strftime, 1

    def monotonic(self):
      if self.left and all(path.exists() for path in begun):
        self.left = 0
      return 0.0 if self.left else 1e9

  clock = Clock()
  monkeypatch.setitem(main.__globals__, "time", clock)

  def run(*words):
    file = tmp_path / "runs" / "results.jsonl"
    before = len(file.read_text().splitlines()) if file.exists() else 0
    here = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "back")]
    if not any(word.startswith("--plan") for word in words):
      here += ["--plan", str(tmp_path / "PLAN.md")]
    monkeypatch.setattr("sys.argv", ["plan.py", *words, *here])
    status = main()
    lines = file.read_text().splitlines() if file.exists() else []
    return status, [json.loads(x) for x in lines[before:]], capsys.readouterr()

  return run


def names_in(parts):
  """Files of an archive in parts."""
  whole = b"".join(path.read_bytes() for path in parts)
  with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
    return tar.getnames()


def test_what_the_time_ends_goes_on_elsewhere(act, tmp_path):
  """Stopped, brought to another machine in parts, completed; what follows."""
  status, (row,), _ = act("next", "--part=4000")
  assert (status, row["experiment"], row["status"]) == (0, "long", "open")
  assert row["found"]["a"]["status"] == "completed"
  back = tmp_path / "back"
  parts = sorted(back.glob("long.tar.gz.*"))
  assert len(parts) > 1 and all(x.stat().st_size <= 4000 for x in parts)
  assert (back / "results.jsonl").exists()
  # Only the newest, and nothing that is not complete.
  saved = {pathlib.Path(x).name for x in names_in(parts) if "checkpoints/" in x}
  assert saved == {"1", "2", "weights"}
  weights = (tmp_path / "runs/b/checkpoints/2/weights").read_bytes()
  shutil.rmtree(tmp_path / "runs")
  back.rename(tmp_path / "runs")

  status, rows, printed = act("next")
  assert status == 1 and "long: is stopped" in printed.out
  said = [(row["experiment"], row["status"]) for row in rows]
  assert said == [("long", "done"), ("short", "done"), ("wrong", "failed")]
  assert rows[0]["found"]["b"]["metrics"] == {"first": 2}  # Went on.
  kept = tmp_path / "runs/b/checkpoints"
  assert (kept / "2/weights").read_bytes() == weights
  (error,) = rows[2]["errors"].values()
  assert error["exit"] == 1 and "what is wrong" in error["log"]
  assert rows[2]["found"]["e"]["status"] == "open"  # Its block did not begin.

  assert act("next")[:2] == (0, [])  # Nothing is open.
  listed = [line.split()[:2] for line in act("list")[2].out.splitlines()]
  assert listed == [["long", "done,"], ["short", "done,"], ["wrong", "failed,"]]
  status, (again,), _ = act("next", "--only", "short")
  assert status == 0 and again["status"] == "done"


def test_weights_that_are_too_large_stay(act, tmp_path):
  """A limit for all that comes back; numbers come in any case."""
  _, (row,), _ = act("next", "--megabytes=0.005")
  assert row["left_out"] == "checkpoints"
  parts = sorted((tmp_path / "back").glob("long.tar.gz.*"))
  names = names_in(parts)
  assert "a/summary.json" in names
  assert not [name for name in names if "checkpoints/" in name]


@pytest.mark.parametrize(("words", "said"), [
  (["next", "--only", "long", "shrot"], "shrot is none of long, short, wrong"),
  (["list", "--only", "lnog"], "lnog is none of long, short, wrong"),
  (["next", "--minutes=-3"], "--minutes=-3: must be positive"),
  (["next", "--part=0"], "--part=0: must be positive"),
  (["next", "--only"], "--only: expected at least one argument"),
  (["list", "--plan=/nope"], "/nope: No such file or directory"),
  (["list", f"--plan={ROOT / 'README.md'}"], "README.md: has no experiments"),
])  # fmt: skip
def test_mistakes_are_one_line(words, said, act, tmp_path, capsys):
  with pytest.raises(SystemExit, match="^2$"):
    act(*words)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and said in line
  assert not (tmp_path / "back").exists()


def test_a_line_that_was_half_written_is_dropped(act, tmp_path):
  (tmp_path / "runs").mkdir()
  file = tmp_path / "runs" / "results.jsonl"
  row = {"experiment": "long", "status": "done", "seconds": 1.0}
  file.write_text(json.dumps(row) + '\n{"experiment": "sho')
  listed = act("list", "--only", "long", "short")[2].out.splitlines()
  assert [line.split()[:2] for line in listed] == [
    ["long", "done,"], ["short", "open"],
  ]  # fmt: skip
  act("next", "--only", "short")
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  assert [row["experiment"] for row in rows] == ["long", "short"]


def test_packages_come_from_a_folder(tmp_path, monkeypatch, capsys):
  """Those that experiments import; JAX and what it brings are there."""
  module = runpy.run_path(str(DEVICE / "plan.py"))
  monkeypatch.setitem(module["install"].__globals__, "ROOT", tmp_path)
  (tmp_path / "wheels").mkdir()
  shutil.copy(ROOT / "setup.cfg", tmp_path)
  asked = []

  def pip(command, **_):
    asked.extend(command[command.index(f"--find-links={tmp_path}/wheels") :])
    error = "WARNING: slow\nERROR: No matching distribution found for flax\n"
    return subprocess.CompletedProcess(command, 1, stderr=error)

  monkeypatch.setattr(subprocess, "run", pip)
  with pytest.raises(SystemExit, match="^2$"):
    module["install"]()
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: not all packages are found in")
  assert line.endswith("wheels: No matching distribution found for flax")
  asked = {re.match(r"\w[\w-]*", x)[0].lower() for x in asked[1:]}
  assert not asked & {"pandas", "markdown-it-py", "scipy"}
  (command,) = re.findall(
    r"(?m)^    pip download .*", (DEVICE / "PLAN.md").read_text()
  )
  named = re.findall(r" '?([a-z][\w-]*)", command.partition("-d wheels")[2])
  assert asked - {"jax", "numpy"} <= set(named)
