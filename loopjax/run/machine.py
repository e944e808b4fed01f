"""Estimates the machine's speed, and how long a run will take on it."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.run import durations, profiling

# Rows of the matrices multiplied; an accelerator needs larger ones.
_CPU_ROWS, _ROWS = 512, 4096
_PROBE_SECONDS = 0.2
# Training reaches this share of the matrix rate per channel of width, up to a
# maximum. Measured on CPUs: 0.08 at 32, 0.16 at 64, 0.25 at 128, 0.6 at 512.
_SHARE_OF_WIDTH, _MOST = 1 / 400, 0.6
_MEASURED_SECONDS = 1.0


@functools.cache
def matrix_rate() -> float:
  """FLOP/s of matrix products over all devices of the run.

  From the data sheet if the device is known; otherwise the rate of float32
  products, measured for a fifth of a second.
  """
  device = jax.devices()[0]
  if peak := profiling.peak_flops(device.device_kind):
    return peak * jax.device_count()
  on_cpu = device.platform == "cpu"
  rows = _CPU_ROWS if on_cpu else _ROWS
  # Virtual devices of one CPU share its cores.
  count = jax.process_count() if on_cpu else jax.device_count()
  matrix, product = jnp.ones((rows, rows), jnp.float32), jax.jit(jnp.matmul)
  jax.block_until_ready(product(matrix, matrix))  # Compiles.
  best, start = float("inf"), time.perf_counter()
  while time.perf_counter() - start < _PROBE_SECONDS:
    before = time.perf_counter()
    jax.block_until_ready(product(matrix, matrix))
    best = min(best, time.perf_counter() - before)
  return count * 2 * rows**3 / best


def training_seconds(flops: float, width: int) -> float:
  """Rough duration of a run here, within a factor of two or three.

  Args:
    flops: FLOPs of the whole run.
    width: width of the model's hidden state.
  """
  share = min(width * _SHARE_OF_WIDTH, _MOST)
  return flops / (share * matrix_rate())


def prediction(flops: float, width: int) -> str:
  """One line on how long a run will take here; see `training_seconds`."""
  expected = durations.text(training_seconds(flops, width))
  return (
    f"about {expected}, estimated from FLOPs and this machine's matrix products"
    f" ({matrix_rate() / 1e9:,.0f} GFLOP/s); a measured estimate follows"
  )


class FirstCalls:
  """Times the first train-step calls of a start, and estimates the time left.

  It blocks on each call for about a second in total; later calls are
  asynchronous.
  """

  def __init__(self, num_steps: int, say: Callable[[str], None]):
    self._num_steps, self._say = num_steps, say
    self._start: tuple[int, float] | None = None
    self._done = False

  def after(self, at: int, outputs: Any) -> None:
    """Records a call.

    Args:
      at: steps taken, including this call's.
      outputs: outputs of the call.
    """
    if self._done:
      return
    jax.block_until_ready(outputs)
    now = time.perf_counter()
    if self._start is None:  # The first call warms up.
      self._start = at, now
      return
    first, start = self._start
    if now - start >= _MEASURED_SECONDS:
      rate = (at - first) / (now - start)
      left = durations.text((self._num_steps - at) / rate)
      self._say(f"{rate:.3g} steps per second; {left} left")
      self._done = True
