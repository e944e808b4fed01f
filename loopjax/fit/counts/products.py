"""Floating-point operations of the matrix products of a program.

Products appear as `dot`; as `convolution` on TPUs; and as custom calls of
cuBLAS, cuDNN's attention and Pallas. Other operations do not count: moving
their arrays dominates their time.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from loopjax.fit.counts import hlo

# By the widest operand: up to 16 bits; float32 rounded by accelerators; float32
# not rounded.
DTYPES = ("bf16", "tf32", "f32")
_BITS = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_ATTENTION = 2  # In attention's forward pass; five in the backward pass.
_ATTENTION_BACKWARD = 5

Instructions = Mapping[str, hlo.Instruction]


class Product(NamedTuple):
  """A product.

  Attributes:
    dtype: one of DTYPES.
    flops: multiplications and additions.
  """

  dtype: str
  flops: int


def product(
  instruction: hlo.Instruction, instructions: Instructions
) -> Product | None:
  """The product that an instruction computes; None for other instructions.

  Args:
    instruction: any instruction.
    instructions: instructions of its computation, by name.
  """
  if instruction.opcode == "dot":
    flops = _dot(
      instruction, instructions, r"lhs_contracting_dims=\{([\d,]*)\}"
    )
  elif instruction.opcode == "convolution":
    flops = _convolution(instruction, instructions)
  elif target := custom_call(instruction):
    if target.startswith(("__cublas", "__triton_gemm")):
      dims = r'"lhs_contracting_dimensions":\s*\[([\d", ]*)\]'
      flops = _dot(instruction, instructions, dims)
    elif target.startswith("__cudnn$fmha"):
      flops = _attention(instruction, instructions, "Backward" in target)
    else:
      stated = re.search(r'"flops":\s*"?(\d+)', instruction.attributes)
      flops = int(stated[1]) if stated else 0
  else:
    return None
  return Product(_dtype(instruction, instructions), flops) if flops else None


def custom_call(instruction: hlo.Instruction) -> str:
  """Target of a custom call; "" for other instructions."""
  match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
  return match[1] if instruction.opcode == "custom-call" and match else ""


def _dtype(instruction: hlo.Instruction, instructions: Instructions) -> str:
  arrays = [
    array
    for name in instruction.operands[:2]
    for array in instructions[name].arrays[:1]
  ]
  widest = max(_BITS.get(array.dtype, 0) for array in arrays)
  if widest <= 16:
    return "bf16"
  precise = re.search(
    r"operand_precision[^\]}]*highest", instruction.attributes, re.IGNORECASE
  )
  return "f32" if precise or widest > 32 else "tf32"


def _dot(
  instruction: hlo.Instruction, instructions: Instructions, contracted: str
) -> int:
  left = instructions[instruction.operands[0]].arrays[0]
  match = re.search(contracted, instruction.attributes)
  axes = re.findall(r"\d+", match[1]) if match else []
  summed = math.prod(left.dims[int(axis)] for axis in axes)
  return 2 * math.prod(instruction.arrays[0].dims) * summed


def _attention(
  instruction: hlo.Instruction, instructions: Instructions, backward: bool
) -> int:
  """cuDNN's attention, of pairs [B, N, T, S] of queries and keys of width H."""
  shape = re.search(
    r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([\d", ]+)\]',
    instruction.attributes,
  )
  if not shape:
    return 0
  pairs = math.prod(int(size) for size in re.findall(r"\d+", shape[1]))
  width = instructions[instruction.operands[0]].arrays[0].dims[-1]
  number = _ATTENTION_BACKWARD if backward else _ATTENTION
  flops = 2 * number * pairs * width
  return flops // 2 if "CAUSAL" in instruction.attributes else flops


def _convolution(
  instruction: hlo.Instruction, instructions: Instructions
) -> int:
  """Convolutions, as which TPUs write products; windows have one element."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  assert labels, instruction.name
  left, right = (
    instructions[name].arrays[0].dims for name in instruction.operands[:2]
  )
  result = instruction.arrays[0].dims
  flops = 2 * right[labels[2].index("i")]
  for axis, label in enumerate(labels[3]):
    if not label.isdigit():
      flops *= result[axis]
  for axis in filter(str.isdigit, labels[3]):
    place = int(axis)
    flops *= _window_pairs(
      size=left[labels[1].index(axis)],
      window=right[labels[2].index(axis)],
      results=result[labels[3].index(axis)],
      stride=_window(instruction, "stride", place, 1),
      low=_window(instruction, "pad", place, 0),
      spread=_window(instruction, "lhs_dilate", place, 1),
      reach=_window(instruction, "rhs_dilate", place, 1),
    )
  return flops


def _window(
  instruction: hlo.Instruction, key: str, axis: int, default: int
) -> int:
  """An entry of window={...}; for a pad, the low padding."""
  window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
  entry = re.search(rf"\b{key}=([-\d_x]+)", window[1]) if window else None
  return int(entry[1].split("x")[axis].split("_")[0]) if entry else default


@functools.lru_cache
def _window_pairs(
  size: int,
  window: int,
  results: int,
  stride: int,
  low: int,
  spread: int,
  reach: int,
) -> int:
  """Pairs of result and window elements that meet an operand's element."""
  # Operand index of a result element and a window element.
  places = np.arange(results) * stride - low
  places = places[:, None] + np.arange(window) * reach
  inside = (places >= 0) & (places <= (size - 1) * spread)
  return int(np.sum(inside & (places % spread == 0)))
