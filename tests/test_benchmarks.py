"""The benchmark of any config, on a config of seconds."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from tests_support import ROOT


@pytest.mark.manual
def test_the_benchmark_of_training_reports_device_loop_and_host():
  done = subprocess.run(
    [
      sys.executable,
      "benchmarks/bench_train.py",
      "--config=configs/sudoku_utm.py:smoke",
      "--calls=1",
    ],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=280,
  )
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  assert report["steps_per_call"] == 5
  assert report["batch_size"] == 16
  times = [name for name in report if "ms" in name]
  assert times, sorted(report)
  assert all(report[name] > 0 for name in times)
  assert 0 < report["compile_seconds"] < report["start_seconds"]
  rate = report["matrix_share"] * report["matrix_gflops"]
  assert 0 < rate < 1.1 * report["matrix_gflops"]


def test_passages_are_disjoint_lines_of_the_book_alone():
  passages = runpy.run_path(str(ROOT / "benchmarks/make_passages.py"))
  lines = [f"line {i} of a book\n" for i in range(200)]
  header = "A header\n*** START OF THIS BOOK ***\n"
  text = header + "".join(lines) + "*** END OF THIS BOOK ***\nA licence\n"
  found = passages["passages"](text, 10, 50)
  assert len(found) == 10
  assert all(x.startswith("line") and 35 < len(x) < 50 for x in found)
  numbers = [int(line.split()[1]) for x in found for line in x.splitlines()]
  assert numbers == sorted(set(numbers))
  assert numbers[0] < 3 and numbers[-1] > 170
  with pytest.raises(ValueError, match="beyond the text's end"):
    passages["passages"](text, 10, 600)
