"""Operators, each with a reference in plain JAX and faster implementations."""

from typing import NamedTuple


class Kernels(NamedTuple):
  """Which implementation of each operator with kernels a model uses.

  Attributes:
    attention: implementation of `nn.attention.attend.attend_to`.
    gated_delta: implementation of `gated_delta.gated_delta`.
    gated_kv: implementation of `gated_kv.gated_kv`.
  """

  attention: str = "xla"
  gated_delta: str | None = None
  gated_kv: str = "reference"


# Keys are values of loop.kernels: "xla" or a platform.
KERNELS = {
  "xla": Kernels(),
  "tpu": Kernels("splash", "pallas_tpu", "pallas_tpu"),
  "gpu": Kernels("cudnn", "pallas_gpu", "pallas_gpu"),
}
