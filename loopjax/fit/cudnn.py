"""cuDNN for an absent GPU: JAX asks the machine at hand which one it has."""

import contextlib
from collections.abc import Iterator

from jax._src.cudnn import fused_attention_stablehlo

# As in `topology`, of the GPUs on which loopjax uses it.
_VERSION = 90800
_CAPABILITY = (9, 0)


@contextlib.contextmanager
def assumed() -> Iterator[None]:
  """JAX traces programs as if there was a Hopper GPU with cuDNN 9.8."""
  instead = {
    "check_cudnn_version": lambda: _VERSION,
    "check_compute_capability": _has,
  }
  own = {name: getattr(fused_attention_stablehlo, name) for name in instead}
  try:
    for name, function in instead.items():
      setattr(fused_attention_stablehlo, name, function)
    yield
  finally:
    for name, function in own.items():
      setattr(fused_attention_stablehlo, name, function)


def _has(capability: str) -> bool:
  return tuple(map(int, capability.split("."))) <= _CAPABILITY
