"""Steps on a device: compared with float64, and timed. See measure.py."""

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
from loopjax.generate.engine import Engine, GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.models import MODELS
from loopjax.program import gradients
from loopjax.program import state as state_lib
from loopjax.run import profiling
from loopjax.types import PRECISIONS


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


def timed(name, arg, kernels, trace):
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
  if trace:
    with jax.profiler.trace(trace):
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


def decoded(name, arg, batch, toy):
  """The time of a token of each of `batch` texts, with random parameters.

  "least_bytes" are those of every loop's weights, of the read-out, and of the
  part of the cache that is written: what a step has to read.
  """
  settings = config_lib.resolve(load_config(name, arg))
  graphdef, _ = program_lib.abstract_model(settings)
  dtype = PRECISIONS[settings.model.precision].compute

  @jax.jit
  def init(key):
    params = state_lib.initial_params(settings, key)
    return jax.tree.map(lambda x: x.astype(dtype), params)

  params = init(jax.random.key(0))
  prompt, short, long = (4, 2, 6) if toy else (256, 32, 160)
  room = prompt + long + 1
  engine = Engine(
    MODELS[settings.model_name],
    graphdef,
    params,
    num_slots=batch,
    max_tokens=room,
    exit_rule="fixed",
  )
  tokens = tuple(range(prompt))  # Fewer than any vocabulary.
  sampling = Sampling(temperature=0)
  times = {}
  for number in (short, long):
    requests = [GenerationRequest(tokens, number, sampling)] * batch
    engine.generate(requests)  # Compiles.
    started = time.perf_counter()
    engine.generate(requests)
    times[number] = time.perf_counter() - started
  seconds = (times[long] - times[short]) / (long - short)
  size = {name: state_lib.num_bytes(x) for name, x in params.items()}
  weights = size["layers"] * settings.model.num_loops
  weights += size.get("head", size["token_embedding"])
  written = (prompt + (short + long) / 2) / room
  least = weights + engine.cache_bytes * written
  return {
    "device": jax.local_devices()[0].device_kind,
    "token_ms": 1e3 * seconds,
    "tokens_per_second": batch / seconds,
    "cache_bytes": engine.cache_bytes,
    "least_bytes": int(least),
    "terabytes_per_second": least / seconds / 1e12,
    **profiling.peak_memory(),
  }
