"""Machines by name: their devices for the compiler, and their memory."""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from loopjax.errors import UserError

GIB = 2**30


class Tpu(NamedTuple):
  """A TPU generation.

  Attributes:
    num_axes: number of axes of its torus.
    memory_gib: memory of one chip that a program can use: the limit that
      libtpu's compiler reports for a program that is too large (0.0.42.1). Data
      sheets (cloud.google.com/tpu/docs) say 32, 16, 95 and 32.
    options: for libtpu, to make one device one chip, as in a real run.
  """

  num_axes: int
  memory_gib: float
  options: dict[str, Any]


class Gpu(NamedTuple):
  """A GPU, from NVIDIA's data sheets and tuning guides (SXM variants)."""

  memory_gb: int  # 10^9 bytes, as sold; the driver reports a little more.
  capability: str  # "a" enables its specific instructions.
  num_cores: int  # Multiprocessors.
  fpus_per_core: int  # Float32 lanes of each.
  shared_kib: int  # Of a multiprocessor; a block gets 1 KiB less.
  l2_mib: int
  bandwidth_gb: int  # 10^9 bytes per second.
  clock_ghz: float  # Boost.


TPUS = {
  "v4": Tpu(3, 30.75, {"chip_config_name": "megacore"}),
  "v5e": Tpu(2, 15.75, {}),
  "v5p": Tpu(3, 95.74, {}),
  "v6e": Tpu(2, 31.25, {}),
}
GPUS = {
  "a100-40": Gpu(40, "8.0", 108, 64, 164, 40, 1555, 1.41),
  "a100": Gpu(80, "8.0", 108, 64, 164, 40, 2039, 1.41),
  "h100": Gpu(80, "9.0a", 132, 128, 228, 50, 3350, 1.98),
  "h200": Gpu(141, "9.0a", 132, 128, 228, 50, 4800, 1.98),
  "b200": Gpu(180, "10.0a", 148, 128, 228, 126, 8000, 1.965),
}
# Fraction of GPU memory that JAX allocates (docs.jax.dev, "GPU memory
# allocation").
_GPU_SHARE = 0.75
_MEMORY_GIB = (1e-9, 1e6)  # Sane amounts: a byte to a petabyte.
_NAMES = "v4:AxBxC, v5e:AxB, v5p:AxBxC, v6e:AxB, " + ", ".join(
  f"{name}:N" for name in (*GPUS, "cpu")
)


class Topology(NamedTuple):
  """A parsed machine name."""

  name: str
  kind: str  # A key of TPUS or GPUS, or "cpu".
  sizes: tuple[int, ...]  # Chips along each axis; GPUs: nodes, GPUs of a node.


class Machine(NamedTuple):
  """Chips to compile for."""

  name: str
  devices: Sequence[Any]  # One per chip.
  memory: int  # Bytes per chip available to a program.
  memory_note: str  # Where this number comes from.
  compiler_options: dict[str, Any]  # To compile without the chip.


def parse(name: str) -> Topology:
  """Reads `v5e:16x16`, `h200:8`, `h200:2x8`, `cpu:8`.

  Raises:
    UserError: there is no such machine.
  """
  match = re.fullmatch(r"([a-z0-9-]+):([1-9]\d*(?:x[1-9]\d*)*)", name)
  kind = match[1] if match else ""
  if not match or kind not in (*TPUS, *GPUS, "cpu"):
    raise UserError(f"--topology={name!r} is not one of {_NAMES}")
  sizes = tuple(int(size) for size in match[2].split("x"))
  num_axes = TPUS[kind].num_axes if kind in TPUS else 1
  if kind in GPUS and len(sizes) == 1:
    sizes = (1, *sizes)
  if len(sizes) != num_axes + (kind in GPUS):
    nodes = ", or 2 for nodes x GPUs" if kind in GPUS else ""
    raise UserError(
      f"--topology={name!r}: {kind} takes {num_axes} size(s){nodes}"
    )
  return Topology(name, kind, sizes)


def absent(name: str, memory_gib: float = 0.0) -> Machine:
  """`machine` by its name, for a process that has not used JAX yet."""
  where = parse(name)
  if where.kind == "cpu":
    jax.config.update("jax_num_cpu_devices", where.sizes[0])
  jax.config.update("jax_enable_compilation_cache", False)
  with quiet_stderr():
    return machine(where, memory_gib)


def machine(topology: Topology, memory_gib: float = 0.0) -> Machine:
  """The chips of a topology, without access to them.

  `memory_gib` is the memory of one chip available to a program; 0 for the known
  value. Raises UserError if a package is not installed, the compiler knows no
  machine of this size, or the amount of memory is unknown or out of range.
  """
  low, high = _MEMORY_GIB
  if memory_gib and not low <= memory_gib <= high:  # Also rejects NaN.
    raise UserError(f"--memory_gib={memory_gib} is not 0 or in [{low}, {high}]")
  options: dict[str, Any] = {}
  if topology.kind in TPUS:
    tpu = TPUS[topology.kind]
    # Hosts have 2x2 chips, except on smaller machines.
    host = [min(2, size) for size in topology.sizes[:2]] + [1]
    devices = _described(
      topology.name,
      "libtpu",
      platform="tpu",
      topology_name=topology.name,
      chips_per_host_bounds=host,
      **tpu.options,
    )
    memory, note = int(tpu.memory_gib * GIB), "the compiler's limit"
  elif topology.kind in GPUS:
    gpu = GPUS[topology.kind]
    nodes, per_node = topology.sizes
    devices = _described(
      topology.name,
      "jax_cuda13_plugin",
      platform="cuda",
      topology=f"1x{nodes}x{per_node}",
      target_config=_target_config(topology.kind, gpu),
    )
    memory = int(gpu.memory_gb * 1e9 * _GPU_SHARE)
    note = f"{_GPU_SHARE:.0%} of {gpu.memory_gb} GB, JAX's default allocation"
    # Use library matrix products: tuning Triton's needs the device.
    options = {"xla_gpu_enable_triton_gemm": False}
  else:
    if not memory_gib:
      raise UserError(f"--topology={topology.name} needs --memory_gib")
    devices, memory, note = _cpu_devices(topology), 0, ""
  if memory_gib:
    memory, note = int(memory_gib * GIB), "--memory_gib"
  return Machine(topology.name, devices, memory, note, options)


def _described(name: str, package: str, **what: Any) -> Sequence[Any]:
  """Devices that are not here, described by the package of their compiler."""
  if importlib.util.find_spec(package) is None:
    raise UserError(
      f"--topology={name} needs the package"
      f" {package.replace('_', '-')}: pip install 'loopjax[fit]'"
    )
  try:
    return topologies.get_topology_desc(**what).devices
  except jax.errors.JaxRuntimeError as error:
    reason = " ".join(str(error).split())
    raise UserError(f"--topology={name}: {reason}") from error


def _cpu_devices(topology: Topology) -> Sequence[Any]:
  (num,) = topology.sizes
  devices = jax.devices("cpu")
  if len(devices) < num:
    raise UserError(
      f"--topology={topology.name}: this process has {len(devices)} device(s)"
    )
  return devices[:num]


def _target_config(kind: str, gpu: Gpu) -> str:
  """XLA's description of an absent GPU, as a text proto."""
  major, _, minor = gpu.capability.rstrip("a").partition(".")
  own = gpu.capability.endswith("a")
  feature = "feature_extension: ACCELERATED_FEATURES" if own else ""
  shared = gpu.shared_kib * 1024
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024
      threads_per_warp: 32
      threads_per_core_limit: 2048
      registers_per_block_limit: 65536
      registers_per_core_limit: 65536
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: {shared - 1024}
      shared_memory_per_core: {shared}
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      core_count: {gpu.num_cores}
      fpus_per_core: {gpu.fpus_per_core}
      clock_rate_ghz: {gpu.clock_ghz}
      l2_cache_size: {gpu.l2_mib * 2**20}
      memory_bandwidth: {int(gpu.bandwidth_gb * 1e9)}
      device_memory_size: {int(gpu.memory_gb * 1e9)}
      cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 8 }}
    runtime_version {{ major: 13 }}
    device_description_str: "NVIDIA {kind.upper()}"
  """


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
  """Captures file descriptor 2, and shows it only if something fails."""
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as log:
    os.dup2(log.fileno(), 2)
    try:
      yield
    except UserError:
      raise
    except Exception:
      log.seek(0)
      os.write(saved, log.read())
      raise
    finally:
      sys.stderr.flush()
      os.dup2(saved, 2)
      os.close(saved)
