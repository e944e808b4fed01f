"""Rows per second of CPU that tasks make, beside what an H200 would take.

  python benchmarks/bench_data.py

For each config with a preset `gpu`, batches are made as in training: in groups
of run.steps_per_call, by two threads. "rows_per_second" is per second of CPU
time, so what one core can make. "needed" is the rate of a train step where one
was measured, else of one that reaches 40 % of an H200's sheet (for float32 that
of TF32), which small models do not. Prints JSON lines.
"""

import argparse
import json
import pathlib
import runpy
import time

import jax

from loopjax import config as config_lib
from loopjax import sharding, train
from loopjax.data import pipeline
from loopjax.run import profiling

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = (
  "multihop_disco", "language_disco", "sudoku_utm", "sudoku_trm", "depo_sleep",
  "automaton_sleep", "gsm_sleep", "maze_trm", "lm_looped", "lm_melt",
)  # fmt: skip
# Rows per second on an H200: steps of 36.8 ms; 170 steps a second while 56 % of
# the time was waiting for data; 290 ms for 16 rows (results/
# 2026-11-28_accelerators.md and 2026-11-28_cpu_2cores_three_hops.md).
MEASURED = {
  "sudoku_utm": 256 / 36.8e-3, "multihop_disco": 500 * 170 / 0.44,
  "lm_melt": 16 / 290e-3,
}  # fmt: skip
_SHARE = 0.4


def measured(name, preset, seconds):
  """The row of a config."""
  get_config = runpy.run_path(str(ROOT / f"configs/{name}.py"))["get_config"]
  settings = config_lib.resolve(get_config(preset))
  mesh = sharding.make_mesh(sharding.Config(), jax.devices()[:1])
  dataset = train.make_datasets(settings, mesh)["train"]
  steps = settings.run.steps_per_call
  groups = pipeline.iterate(dataset.batches, group=steps)
  next(groups)
  calls, began, cpu = 0, time.monotonic(), time.process_time()
  while time.monotonic() - began < seconds or not calls:
    next(groups)
    calls += 1
  rows = calls * steps * settings.run.batch_size
  rate = rows / (time.process_time() - cpu)
  costs = settings.family.costs(
    settings.model, settings.spec, settings.model.num_loops
  )
  flops = profiling.training_flops(costs)
  sheet = profiling.peak_flops("NVIDIA H200")
  sheet *= 0.5 if settings.model.precision == "float32" else 1.0
  needed = MEASURED.get(name, _SHARE * sheet / flops)
  return {
    "config": f"{name}:{preset}",
    "steps_per_call": steps,
    "rows_per_second": round(rate),
    "needed": round(needed),
    "measured": name in MEASURED,
    "times": round(rate / needed, 1),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="*", default=CONFIGS)
  parser.add_argument("--preset", default="gpu")
  parser.add_argument("--seconds", type=float, default=5.0, help="per config")
  options = parser.parse_args()
  for name in options.only:
    row = measured(name, options.preset, options.seconds)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
