"""The script on every host of a TPU, with a stand-in for the run."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest
from tests_support import ROOT

# Ends with the requested status, or saves when signalled.
RUN = """#!/bin/bash
echo "run $*"
echo "$$" >>"$STANDINS/pids"
if [[ -s $STANDINS/status ]]; then
  exit "$(<"$STANDINS/status")"
fi
trap 'echo saved; echo saved >>"$STANDINS/events"; exit 4' TERM
echo started >>"$STANDINS/events"
while true; do sleep 0.05; done
"""
CURL = """#!/bin/bash
[[ $* == *instance/preempted* ]] && cat "$STANDINS/preempted" 2>/dev/null
"""


class Host:
  """A directory with loopjax, and the tools of the host."""

  def __init__(self, directory):
    self.directory = directory
    for name, text in ((".venv/bin/python", RUN), ("bin/curl", CURL)):
      path = directory / name
      path.parent.mkdir(parents=True)
      path.write_text(text)
      path.chmod(0o755)
    (directory / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "tpu_host.sh", directory / "launch")

  def start(self, attempt, *flags):
    command = [self.directory / "launch" / "tpu_host.sh", "run", attempt]
    return subprocess.Popen(
      [*command, *flags],
      env={
        "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
        "STANDINS": str(self.directory),
        "RUNS": str(self.directory / "runs"),
        "PAUSE": "0.05",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )

  def follow(self, attempt, *flags):
    process = self.start(attempt, *flags)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output

  def write(self, name, text):
    (self.directory / name).write_text(text)

  def lines(self, name):
    path = self.directory / name
    return path.read_text().split() if path.exists() else []

  def wait_for(self, events):
    for _ in range(600):
      if self.lines("events") == events:
        return
      time.sleep(0.05)
    raise AssertionError(self.lines("events"))


@pytest.fixture
def host(tmp_path):
  host = Host(tmp_path)
  yield host
  for pid in host.lines("pids"):
    with contextlib.suppress(ProcessLookupError):
      os.kill(int(pid), signal.SIGKILL)


def test_output_and_status_are_the_run_s(host):
  host.write("status", "3")
  status, output = host.follow("1", "--config=c.py", "--workdir=/a b")
  assert status == 3
  flags = "--distributed --config=c.py --workdir=/a b"
  assert output == f"run -u -m loopjax.main {flags}\n"


def test_the_status_of_an_attempt_can_be_asked_for(host):
  host.write("status", "3")
  host.follow("1", "--config=c.py")
  done = subprocess.run(
    [host.directory / "launch" / "tpu_host.sh", "status", "1"],
    env={"PATH": "/usr/bin:/bin", "RUNS": str(host.directory / "runs")},
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (0, "3\n")


def test_an_attempt_is_started_once(host):
  host.write("status", "4")
  first = host.follow("1", "--config=c.py")
  assert host.follow("1", "--config=c.py") == first
  assert len(host.lines("pids")) == 1
  assert host.follow("2", "--config=c.py") == first
  assert len(host.lines("pids")) == 2


def test_a_run_outlives_the_connection(host):
  lost = host.start("1")
  host.wait_for(["started"])
  os.killpg(lost.pid, signal.SIGHUP)
  lost.wait(timeout=30)
  lost.stdout.close()
  again = host.start("1")
  (pid,) = host.lines("pids")
  os.kill(int(pid), signal.SIGTERM)
  output, _ = again.communicate(timeout=30)
  assert (again.returncode, output.splitlines()[-1]) == (4, "saved")
  assert len(host.lines("pids")) == 1


def test_another_attempt_lets_the_older_run_save_first(host):
  older = host.start("1")
  host.wait_for(["started"])
  newer = host.start("2")
  host.wait_for(["started", "saved", "started"])
  output, _ = older.communicate(timeout=30)
  assert (older.returncode, output.splitlines()[-1]) == (4, "saved")
  os.kill(int(host.lines("pids")[-1]), signal.SIGTERM)
  newer.communicate(timeout=30)
  assert newer.returncode == 4


def test_the_run_is_told_that_the_machine_goes(host):
  host.write("preempted", "FALSE")
  run = host.start("1")
  host.wait_for(["started"])
  host.write("preempted", "TRUE")
  output, _ = run.communicate(timeout=30)
  assert (run.returncode, output.splitlines()[-1]) == (4, "saved")


def test_what_was_killed_as_a_whole_may_be_started_again(host):
  run = host.start("1")
  host.wait_for(["started"])
  supervisor = (host.directory / "runs" / "1.pid").read_text()
  for pid in (int(supervisor), int(host.lines("pids")[0])):
    os.kill(pid, signal.SIGKILL)
  run.communicate(timeout=30)
  assert run.returncode == 137
