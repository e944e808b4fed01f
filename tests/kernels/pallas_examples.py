"""Kernels interpreted, lowered for other machines, and compiled ahead."""

import importlib

import jax
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from loopjax.fit import topology

# Unwritten memory is NaN, and so are the ends of partial tiles.
POISON = pltpu.InterpretParams(uninitialized_memory="nan")


def on_tpu():
  """A context in which kernels for TPUs are interpreted."""
  return pltpu.force_tpu_interpret_mode(POISON)


def on_gpu(monkeypatch):
  """A context in which kernels for GPUs are interpreted."""
  if hasattr(plgpu, "InterpretGPUParams"):
    params, force = plgpu.InterpretGPUParams, plgpu.force_gpu_interpret_mode
  else:  # JAX 0.10 does not support casts of layouts there.
    module = importlib.import_module(
      "jax._src.pallas.mosaic_gpu.interpret.params"
    )
    params, force = module.InterpretGPUParams, module.force_gpu_interpret_mode
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
  return force(params(uninitialized_memory="nan"))


def calls_for_tpu(function, operands):
  """Lines of the lowered program that call kernels, and the kernels' names."""
  lower = export.export(jax.jit(function), platforms=["tpu"])
  text = lower(*operands).mlir_module()
  calls = [x for x in text.split("\n") if "@tpu_custom_call" in x]
  names = [x.split('kernel_name = "')[1].split('"')[0] for x in calls]
  return calls, names


def num_kernels_for_hopper(function, operands):
  """Number of kernels that the lowered program calls."""
  unstable = [
    export.DisabledSafetyCheck.custom_call(f"mosaic_gpu{version}")
    for version in ("", "_v2")
  ]
  lower = export.export(
    jax.jit(function), platforms=["cuda"], disabled_checks=unstable
  )
  hopper = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100", num_cores=132, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=hopper)
  with jax.sharding.use_abstract_mesh(mesh):
    text = lower(*operands).mlir_module()
  return sum("@mosaic_gpu" in x for x in text.split("\n"))


MACHINES = ("v5e:2x2", "v5p:2x2x1", "h100:1")


def compiler(name, monkeypatch):
  """(one of MACHINES that is not here, the implementation for it)."""
  is_gpu = name.startswith("h100")
  pytest.importorskip("jax_cuda13_plugin" if is_gpu else "libtpu")
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
  monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  machine = topology.machine(topology.parse(name))
  return machine, "pallas_gpu" if is_gpu else "pallas_tpu"
