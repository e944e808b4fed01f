"""The first hour on a GPU, rehearsed on a CPU at toy sizes."""

import json
import os
import subprocess
import sys

import pytest
from tests_support import ROOT

SCRIPT = ROOT / "benchmarks" / "device" / "hour.py"


def hour(part, folder, *more):
  """Rows after a call."""
  rows = folder / "rows.jsonl"
  done = subprocess.run(
    [sys.executable, SCRIPT, part, f"--out={rows}", "--toy", *more],
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=280,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.manual
def test_the_first_hour(tmp_path):
  """Every part; existing and truncated rows, and no time left."""
  checks = hour("checks", tmp_path)
  assert [row["name"] for row in checks] == [
    "check/attention/0", "check/gated_kv/0", "check/gated_delta/0",
    "family/looped", "time/attention", "time/gated_kv", "time/gated_delta",
  ]  # fmt: skip
  assert all(row["ok"] for row in checks[:4]), checks
  assert all(row["plain_ms"] > 0 for row in checks[4:]), checks
  with (tmp_path / "rows.jsonl").open("a") as file:
    file.write('{"name": "cut')
  assert hour("checks", tmp_path) == checks
  (step,) = hour("steps", tmp_path, f"--traces={tmp_path / 't'}")[7:]
  assert step["step_ms"] > 0 and step["compiled_bytes"] > 0, step
  assert list((tmp_path / "t").rglob("*.xplane.pb"))
  assert len(hour("presets", tmp_path, "--minutes=0")) == 8
  (run,) = hour("presets", tmp_path, f"--runs={tmp_path / 'runs'}")[8:]
  assert run["status"] == "completed", run
