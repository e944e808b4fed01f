"""Train steps on a device: compared with float64, and timed. See hour.py."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from in_float64 import in_float64
from tests_support import SMOKE, load_config, make_datasets

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data import pipeline
from loopjax.program import gradients
from loopjax.run import profiling


def family(name, kernels, apart):
  """Errors of loss and gradients of a batch, bfloat16 against float64.

  Args:
    name: a family.
    kernels: loop.kernels on the device.
    apart: relative distance of two pytrees.
  """
  config = load_config(*SMOKE[name])
  # Widths that kernels support.
  wide = {"model.width": 128, "model.num_heads": 2}
  config_lib.override(config, {"model.precision": "bfloat16", **wide})
  settings = config_lib.resolve(config)
  found = {}
  dataset = make_datasets(settings)["train"]
  batch = next(pipeline.iterate(dataset.batches, num_threads=0))
  exact = None
  for which in dict.fromkeys(("xla", kernels)):
    config_lib.override(config, {"loop.kernels": which})
    settings = config_lib.resolve(config)
    program = program_lib.make_program(settings, jax.local_devices()[:1])
    state = program.init(jax.random.key(0))

    def loss_of(
      params, batch, key, step, teacher, settings=settings, program=program
    ):
      del teacher
      model = nnx.merge(program.graphdef, params)
      loss, metrics = settings.family.loss(model, batch, key, step, None)
      return loss, {"loss": loss, **metrics}

    def run(params, batch, key, step, carried, loss_of=loss_of):
      metrics, _, grads = gradients.gradients(
        loss_of,
        (params, {}),
        batch,
        carried,
        (key, step),
        1,
        gradients.Layout(casts=True),
      )
      return metrics["loss"], grads

    args = state.params, batch, state.key, state.step, state.carried
    if exact is None:
      cpu = jax.devices("cpu")[0]
      with jax.default_device(cpu), jax.enable_x64(True):
        there = jax.device_put(args, cpu)
        options = {"xla_backend_optimization_level": 0}  # Compiles sooner.
        program64 = jax.jit(in_float64(run), compiler_options=options)
        exact = jax.device_get(program64(*there))
    found[which] = apart(jax.device_get(jax.jit(run)(*args)), exact)
  found["ok"] = all(x < 0.05 for x in found.values())
  return found


def timed(name, arg, kernels, traces):
  """Time, memory and utilisation of a train step on synthetic data."""
  config = load_config(name, arg)
  overrides = {"loop.kernels": kernels, "run.steps_per_call": 1}
  config_lib.override(config, overrides)
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.local_devices()[:1])
  batches = jax.tree.map(
    lambda x: jnp.ones(x.shape, x.dtype),
    program_lib.abstract_batches(settings, program.mesh),
  )
  state = program.init(jax.random.key(0))
  compiled = program.train.lower(state, batches, {}).compile()
  memory = compiled.memory_analysis()
  times = []
  state, metrics = compiled(state, batches, {})
  jax.block_until_ready(metrics)
  for _ in range(5):
    started = time.perf_counter()
    state, metrics = compiled(state, batches, {})
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - started)
  if traces:
    with jax.profiler.trace(f"{traces}/{name}-{kernels}"):
      jax.block_until_ready(compiled(state, batches, {}))
  seconds = sorted(times)[2]
  per_example = profiling.training_flops(program.costs)
  rate = settings.run.batch_size * per_example / seconds
  peak = profiling.peak_flops(jax.local_devices()[0].device_kind)
  needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  return {
    "device": jax.local_devices()[0].device_kind,
    "remat": program.settings.loop.remat,
    "step_ms": 1e3 * seconds,
    "tflops": rate / 1e12,
    "mfu": None if peak is None else rate / peak,
    "compiled_bytes": needed,
    **profiling.peak_memory(),
    "loss": float(np.asarray(metrics["loss"])[0]),
  }
