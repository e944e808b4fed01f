"""The command: `loopjax fit`."""

import json
import os
import subprocess
import sys

import pytest
from tests_support import ROOT

SMOKE = "--config=configs/sudoku_utm.py:smoke"
# Small, quick to compile, and only microbatches save memory.
STEP = (
  SMOKE,
  "--config.model.norm=rmsnorm",
  "--config.model.halting=fixed",
  "--config.task.box_cols=3",
  "--config.loop.remat=full",
  "--config.mesh.fsdp=2",
  "--config.run.batch_size=4",
  "--topology=cpu:2",
  "--memory_gib=0.00026",  # 272 KiB; whole batches need 334, halves 219.
)


def run(*arguments):
  """In a separate process, which must not search for accelerators."""
  environment = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cuda"}
  return subprocess.run(
    [sys.executable, "-m", "loopjax", "fit", *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


def section(report, title):
  """The lines under a heading of the report, without their indentation."""
  _, _, rest = report.partition(f"\n{title}")
  return [line.strip() for line in rest.split("\n\n")[0].splitlines()[1:]]


@pytest.fixture(scope="module")
def too_small():
  return run(*STEP)


@pytest.mark.long
def test_the_report(too_small):
  assert too_small.returncode == 1, too_small.stderr
  assert too_small.stderr == ""
  report = too_small.stdout
  assert report.startswith(
    "cpu:2: 2 x cpu; 4 examples per step in 1 part(s), 5 step(s) per call,"
    " loop.remat=full\nmesh: data 1, fsdp 2, tensor 1; compiled in "
  )
  arguments, temporaries, outputs, program, peak, available = section(
    report, "memory per chip"
  )
  # Float32; the optimizer has two moments. Steps of 2 boards of 36 cells in
  # three arrays.
  assert "parameters 13.53 KiB, EMA 13.53 KiB, optimizer 27.07" in arguments
  assert f"batch {5 * 2 * 3 * 36 * 4 / 1024:.2f} KiB" in arguments
  parts = [arguments, temporaries, outputs, program]
  sizes = [line.split()[1:3] for line in parts]
  kib = sum(float(x) / (1024 if unit == "B" else 1) for x, unit in sizes)
  assert peak.split()[0] == "peak" and peak.split()[2] == "KiB"
  assert abs(float(peak.split()[1]) - kib) < 0.05
  assert available.split() == ["available", "272.63", "KiB", "--memory_gib"]
  kinds = section(report, "collectives per optimizer step")
  assert [line.split()[0] for line in kinds] == ["all-reduce"]
  largest = section(report, "largest values")
  assert len(largest) == 10
  assert any("loopjax/nn/mlp.py:" in line for line in largest)


@pytest.mark.long
def test_the_suggestion_fits_and_is_ranked(too_small, tmp_path):
  *_, verdict, title, tried, advice = too_small.stdout.splitlines()
  assert verdict.startswith("does not fit: ")
  assert title == "tried:"
  flag = "--config.run.num_microbatches=2"
  assert tried.startswith(f"  {flag}: fits: ")
  assert advice == f"add {flag} (the same result)"
  path = tmp_path / "step.json"
  followed = run(*STEP, flag, "--time", f"--json={path}")
  assert followed.returncode == 0, followed.stderr
  assert "4 examples per step in 2 part(s)" in followed.stdout
  assert followed.stdout.splitlines()[-1].startswith("fits: ")
  assert "by its roofline (not a time)" in followed.stdout
  record = json.loads(path.read_text())
  assert {"attention", "mlp", "read_out", "optimizer"} <= record["parts"].keys()
  parts = record["parts"].values()
  for key in ("launches", "bytes"):
    total = sum(part[key] for part in parts)
    assert total == pytest.approx(record["total"][key])
  # The model's operations, and recomputation.
  assert sum(record["total"]["flops"].values()) > record["model_flops"]


def test_parameters_that_are_only_read_have_no_train_step():
  done = run(SMOKE, "--config.model.precision=bfloat16_params", *STEP[-2:])
  assert done.returncode == 2
  assert "'bfloat16_params' is for inference only" in done.stderr
