"""Costs of a run: traces, memory and model-FLOPs utilisation."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from loopjax.errors import UserError

# Dense bfloat16 FLOP/s of one device, from the vendors' data sheets, by a part
# of `device_kind`; the first match counts.
_PEAK_FLOPS = (
  ("TPU v4", 275e12),
  ("TPU v5 lite", 197e12),
  ("TPU v5e", 197e12),
  ("TPU v5", 459e12),
  ("TPU v6 lite", 918e12),
  ("TPU v6e", 918e12),
  ("TPU7x", 2307e12),
  ("A100", 312e12),
  ("H100 PCIe", 756e12),
  ("H100 NVL", 835e12),
  ("H100", 989e12),
  ("H200 NVL", 835e12),
  ("H200", 989e12),
  ("GB200", 2500e12),
  ("B200", 2250e12),
)
# Forward pass, plus a backward pass that costs twice as much.
_TRAIN_OVER_FORWARD = 3


def step_range(text: str, num_steps: int) -> range:
  """`run.profile_steps` as steps; empty for ""."""
  if not text:
    return range(0)
  first, _, end = text.partition(":")
  if first.isdecimal() and end.isdecimal():
    steps = range(int(first), int(end))
    if steps and steps.stop <= num_steps:
      return steps
  raise UserError(
    f"run.profile_steps={text!r} is not FIRST:END with 0 <= FIRST < END <="
    f" run.num_steps={num_steps}"
  )


class Tracer:
  """Traces steps of a run into a directory, for TensorBoard or Perfetto.

  Every call that contains one of the steps is traced whole.
  """

  def __init__(self, steps: range, directory: pathlib.Path):
    self._steps, self._directory = steps, directory
    self._running = False

  def before(self, call: range) -> None:
    """Starts the trace at the first call that contains one of the steps."""
    first = max(call.start, self._steps.start)
    if jax.process_index():  # The trace of process 0 stands for all.
      return
    if not self._running and first < min(call.stop, self._steps.stop):
      jax.profiler.start_trace(str(self._directory))
      self._running = True

  def after(self, call: range, outputs: Any) -> None:
    """Stops the trace after the last such call, once its outputs are ready."""
    if self._running and call.stop >= self._steps.stop:
      jax.block_until_ready(outputs)
      self.close()

  def close(self) -> None:
    """Writes the trace in progress, if there is one."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False


def memory(compiled: Any) -> dict[str, int]:
  """Bytes on each device that a compiled step needs, by kind.

  "arguments" are the state and the batch, "temporaries" activations and
  gradients, "outputs" results not written into the arguments' memory.
  """
  sizes = compiled.memory_analysis()
  return {
    "arguments": sizes.argument_size_in_bytes,
    "temporaries": sizes.temp_size_in_bytes,
    "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
  }


def training_flops(costs: Mapping[str, Any]) -> float:
  """FLOPs of a training step per example, counted analytically.

  Recomputation by rematerialisation does not count; frozen parameters count
  like others.
  """
  forward = costs["flops_per_example"][-1]
  return costs.get("training_flops_per_example", _TRAIN_OVER_FORWARD * forward)


def rates(flops: float, examples_per_second: float) -> dict[str, float]:
  """Model FLOP/s of training over all devices, and the fraction of their peak.

  Returns:
    "model_flops_per_second", and "model_flops_utilization" where the device's
    peak is known, which excludes CPUs.
  """
  flops *= examples_per_second
  peak = peak_flops(jax.devices()[0].device_kind)
  result = {"model_flops_per_second": flops}
  if peak:
    result["model_flops_utilization"] = flops / (peak * jax.device_count())
  return result


def peak_flops(device_kind: str) -> float | None:
  """Dense bfloat16 FLOP/s of a device, or None if unknown."""
  for part, flops in _PEAK_FLOPS:
    if part.lower() in device_kind.lower():
      return flops
  return None


def peak_memory() -> dict[str, float]:
  """Peak bytes in use on the first local device, if it reports them."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" not in stats:
    return {}
  return {"peak_memory_bytes": float(stats["peak_bytes_in_use"])}
