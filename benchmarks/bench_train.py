"""Measures training of one config and prints JSON.

  python benchmarks/bench_train.py --config=configs/sudoku_utm.py:tiny

Numbers are for this process on this machine; compare two configs or two
revisions only within one session. Fields:

  start_seconds       trace, lower and compile the train call (cold), or load it
                      from the persistent cache (warm: run twice with
                      --cache=DIR)
  compile_seconds     only the compilation
  device_step_ms      one step with the batch already on the device
  loop_step_ms        one step of the training loop as `train` runs it: data,
                      transfer, dispatch, metrics
  matrix_gflops       rate of a 388 x 512 x 1365 float32 product, the best
                      between the timed calls
  matrix_share        FLOP/s of the fastest step by the family's costs, divided
                      by matrix_gflops
  host_share          1 - device_step_ms / loop_step_ms
  data_wait_fraction  fraction of the loop spent waiting for the next batch
  data_alone_per_s    examples per second of the input pipeline alone
  peak_bytes          arguments + outputs + temporaries of the compiled program
  eval_*              the evaluation step with scan and with while, same
                      parameters
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding, train
from loopjax.config import settings as settings_lib
from loopjax.data import pipeline
from loopjax.run import metrics, profiling, provenance
from loopjax.train import evaluate
from loopjax.train import loop as train_loop

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
_CALLS = flags.DEFINE_integer("calls", 5, "Timed calls; 0 to compile only.")
_CACHE = flags.DEFINE_string("cache", None, "Compilation cache directory.")
# Rows, inputs and outputs of the reference product: the MLP of 4 boards of 9x9
# cells with 16 memory tokens at width 512.
_PRODUCT = (388, 512, 1365)


def main(argv):
  del argv
  if _CACHE.value:
    jax.config.update("jax_compilation_cache_dir", _CACHE.value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  settings = config_lib.resolve(_CONFIG.value)
  program = program_lib.make_program(settings)
  dataset = train.make_datasets(settings, program.mesh)["train"]
  steps = settings.run.steps_per_call
  calls = pipeline.iterate(dataset.batches, group=steps)

  def put():
    return sharding.put_batch(
      program.mesh, next(calls), settings.run.batch_size, stacked=True
    )

  batches = put()
  start = time.perf_counter()
  lowered = program.train.lower(program.abstract_state, batches, {})
  traced = time.perf_counter()
  compiled = lowered.compile()
  report = {
    "start_seconds": time.perf_counter() - start,
    "compile_seconds": time.perf_counter() - traced,
    "peak_bytes": _peak_bytes(compiled),
    "batch_size": settings.run.batch_size,
    "steps_per_call": settings.run.steps_per_call,
  }
  if _CALLS.value:
    state = program.init(jax.random.key(0))
    state, times = _time_loop(program, compiled, state, batches, put)
    report |= times | _eval_times(settings, program, state)
  report["data_alone_per_s"] = _data_rate(dataset, settings.run.batch_size)
  print(json.dumps(report | provenance.environment(), indent=2))


def _time_loop(program, compiled, state, batches, put):
  """Times calls on a batch already on the device, and calls as in training.

  They alternate with the product, under the same conditions.
  """
  run, product = program.settings.run, _make_product()
  state, values = compiled(state, batches, {})
  jax.block_until_ready((state, values))
  device, loop, waits, products = [], [], [], []
  for _ in range(_CALLS.value):
    products.append(product())
    start = time.perf_counter()
    state, values = compiled(state, batches, {})
    jax.block_until_ready((state, values))
    device.append(time.perf_counter() - start)
    start = time.perf_counter()
    fresh = put()
    waits.append(time.perf_counter() - start)
    state, values = compiled(state, fresh, {})
    metrics.flat(train_loop.mean_of_good_steps([jax.device_get(values)]))
    loop.append(time.perf_counter() - start)
  steps = run.steps_per_call
  device_step, loop_step = np.median(device) / steps, np.median(loop) / steps
  matrix_rate = 2 * np.prod(_PRODUCT) / min(products)
  flops = profiling.training_flops(program.costs) * run.batch_size
  return state, {
    "device_step_ms": 1e3 * device_step,
    "loop_step_ms": 1e3 * loop_step,
    "matrix_gflops": matrix_rate / 1e9,
    "matrix_share": flops * steps / min(device) / matrix_rate,
    "host_share": 1 - device_step / loop_step,
    "data_wait_fraction": float(np.sum(waits) / np.sum(loop)),
    "examples_per_second": run.batch_size / loop_step,
  }


def _make_product(repeats: int = 5):
  """A function that returns the seconds of one product, the best of several."""
  rows, inputs, outputs = _PRODUCT
  x, y = jnp.ones((rows, inputs)), jnp.ones((inputs, outputs))
  multiply = jax.jit(jnp.matmul)
  jax.block_until_ready(multiply(x, y))

  def seconds() -> float:
    times = []
    for _ in range(repeats):
      start = time.perf_counter()
      jax.block_until_ready(multiply(x, y))
      times.append(time.perf_counter() - start)
    return min(times)

  return seconds


def _peak_bytes(compiled) -> int:
  memory = compiled.memory_analysis()
  return int(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes
  )


def _data_rate(dataset, batch_size: int, num_batches: int = 50) -> float:
  """Examples per second of the pipeline in one thread."""
  batches = pipeline.iterate(dataset.batches, num_threads=0)
  next(batches)
  start = time.perf_counter()
  for _ in range(num_batches):
    next(batches)
  return num_batches * batch_size / (time.perf_counter() - start)


def _eval_times(settings, program, state) -> dict[str, float]:
  """Seconds of one evaluation batch by execution of the loop, once compiled."""
  datasets = train.make_datasets(settings, program.mesh, ("validation",))
  times = {}
  for kind in ("scan", "while"):
    changed = settings._replace(
      eval=settings_lib.Eval(
        batch_size=settings.eval.batch_size, execution=kind
      )
    )
    evaluator = evaluate.make_evaluator(
      program._replace(settings=changed), datasets
    )
    params = state.ema or state.params
    evaluator(params, "validation", settings.eval.batch_size)
    start = time.perf_counter()
    found = evaluator(params, "validation", settings.eval.batch_size)
    values = found["validation"]
    times[f"eval_{kind}_seconds"] = time.perf_counter() - start
    times[f"eval_{kind}_loops_run"] = values["loops_run"]
  return times


if __name__ == "__main__":
  app.run(main)
