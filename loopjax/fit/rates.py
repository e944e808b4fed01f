"""What the chips of a machine can do in a second, by their data sheets.

A program reaches less: the shares are those of large products of bfloat16 and
of copies on one H200 (790 TFLOP/s, 4.3 TB/s), and assumed for the others.
"""

from collections.abc import Mapping
from typing import NamedTuple

COMPUTE_SHARE = 0.8
BANDWIDTH_SHARE = 0.9


class Rates(NamedTuple):
  """A chip.

  Attributes:
    bf16: 10^12 operations per second of dense products with 16-bit inputs.
    tf32: of float32 inputs that it rounds: to TF32, or on TPUs to bfloat16.
    f32: of float32 inputs that it does not round; on TPUs six products of
      bfloat16.
    memory: 10^9 bytes per second from its main memory.
    network: 10^9 bytes per second that it receives from other chips.
    launch: 10^-6 seconds to start a kernel; 0 on TPUs, whose program is one.
    source: where the numbers are from.
  """

  bf16: float
  tf32: float
  f32: float
  memory: float
  network: float
  launch: float
  source: str


_NVIDIA = "resources.nvidia.com, data sheets of H100 and H200 (SXM, dense)"
_GOOGLE = "cloud.google.com/tpu/docs, "
RATES = {
  "h100": Rates(989.4, 494.7, 66.9, 3350, 450, 2.0, _NVIDIA),
  "h200": Rates(989.4, 494.7, 66.9, 4800, 450, 2.0, _NVIDIA),
  "v5e": Rates(197, 197, 197 / 6, 819, 200, 0.0, _GOOGLE + "v5e"),
  "v5p": Rates(459, 459, 459 / 6, 2765, 600, 0.0, _GOOGLE + "v5p"),
  "v6e": Rates(918, 918, 918 / 6, 1640, 448, 0.0, _GOOGLE + "v6e"),
}


def seconds(
  rates: Rates,
  flops: Mapping[str, float],
  num_bytes: float,
  network_bytes: float,
) -> float:
  """Time that a kernel takes at least: what takes longest of its parts.

  Args:
    rates: of the chip.
    flops: by dtype, a key of `products.DTYPES`.
    num_bytes: from and to main memory.
    network_bytes: from other chips.
  """
  compute = sum(
    number / getattr(rates, dtype) for dtype, number in flops.items()
  )
  return rates.launch * 1e-6 + max(
    compute / (COMPUTE_SHARE * 1e12),
    num_bytes / (BANDWIDTH_SHARE * 1e9 * rates.memory),
    network_bytes / (BANDWIDTH_SHARE * 1e9 * rates.network),
  )
