"""Counts of a program: operations of products, and bytes that it moves.

Products appear as `dot`; as `convolution` on TPUs; and as custom calls of
cuBLAS, cuDNN's attention and Pallas. Other operations do not count: moving
their arrays dominates their time.

Bytes are those between chips, and from and to main memory: there, each operand
is read once and each result written once. If an operand is only sliced, only
the slices count; if a result updates an operand in place, only the update
counts.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from loopjax.fit import hlo

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
  """The product that an instruction of a computation computes, if it is one."""
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


KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


class Traffic(NamedTuple):
  """Collectives of one call.

  Attributes:
    executions: by kind.
    num_bytes: by kind; results on one chip, without padding.
    unknown: names of loops whose length the text does not state; their contents
      count once.
  """

  executions: dict[str, int]
  num_bytes: dict[str, int]
  unknown: tuple[str, ...]


def collectives(module: hlo.Module) -> Traffic:
  """Counts collectives, multiplied by the iterations of enclosing loops.

  An asynchronous collective counts at its "done", because the result of its
  "start" also contains the operands. Libtpu spreads a collective over a chain
  of fusions, and writes a reduce-scatter as a fusion that begins with an
  all-reduce.
  """
  times, unknown = hlo.executions(module)
  totals: dict[str, tuple[int, str, int]] = {}
  for name, computation in module.computations.items():
    scatter = name.startswith("all-reduce-scatter")
    for instruction in computation.instructions.values():
      kind = instruction.opcode.removesuffix("-done")
      if kind not in KINDS or not times[name]:
        continue
      result = computation.root if scatter else instruction
      size = sum(array.num_bytes for array in result.arrays)
      one = (times[name], "reduce-scatter" if scatter else kind, size)
      chain = re.search(r'\bchain_id="\d+"', instruction.attributes)
      key = chain[0] if chain else f"{name}/{instruction.name}"
      totals[key] = max(totals.get(key, one), one)
  number_of: Counter[str] = Counter()
  num_bytes: Counter[str] = Counter()
  for number, kind, size in totals.values():
    number_of[kind] += number
    num_bytes[kind] += number * size
  return Traffic(dict(number_of), dict(num_bytes), unknown)


_IN_PLACE = ("dynamic-update-slice", "scatter")
_LIBRARIES = ("__cublas", "__cudnn")
_SLICES = ("dynamic-slice", "gather", "slice")
# Opcodes that pass on all elements, in a fusion.
_SAME = ("bitcast", "convert", "copy", "reshape", "transpose")
# Instructions that move nothing; also every "-done", and "async-start", whose
# computation counts.
_FREE = (
  "add-dependency",
  "after-all",
  "async-start",
  "bitcast",
  "call",
  "conditional",
  "constant",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
  "while",
)
# Custom calls that are not kernels.
_NO_KERNEL = ("AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")


def launches(instruction: hlo.Instruction) -> bool:
  """Whether an instruction of an executed computation does work."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(("-done", "-update")):
    return False
  return custom_call(instruction) not in _NO_KERNEL


def num_bytes(
  module: hlo.Module, name: str, instruction: hlo.Instruction
) -> int:
  """Bytes that an instruction of computation `name` reads and writes."""
  instructions = module.computations[name].instructions
  opcode = instruction.opcode
  if opcode in ("fusion", "fusion-start"):
    fused = module.computations[dict(instruction.called)["calls"]]
    return _fusion(fused, instruction, instructions)
  operands = [_size(instructions[x]) for x in instruction.operands]
  if opcode == "copy-start":  # (destination, source, context).
    to = instruction.arrays[0]
    return sum(operands) + (to.padded_bytes if to.in_main_memory else 0)
  if opcode.endswith("-start"):  # (operands, results, ...).
    return sum(operands) + max(x.padded_bytes for x in instruction.arrays)
  result = _written(instruction)
  if opcode in ("dynamic-slice", "slice", "gather"):
    return 2 * result + sum(operands[1:])
  if opcode == "dynamic-update-slice":
    return 2 * operands[1]
  if opcode == "scatter":
    return sum(operands[1:]) + operands[2]
  return sum(operands) + result


def _fusion(
  fused: hlo.Computation,
  instruction: hlo.Instruction,
  instructions: Instructions,
) -> int:
  users: dict[str, list[tuple[int, hlo.Instruction]]] = {}
  for user in fused.instructions.values():
    for place, operand in enumerate(user.operands):
      users.setdefault(operand, []).append((place, user))
  total = 0
  for inner in fused.instructions.values():
    if inner.opcode == "parameter":
      outer = instructions[instruction.operands[int(inner.arguments)]]
      whole = _size(outer)
      total += min(whole, _read(inner.name, users, whole))
  roots = [fused.root]
  if fused.root.opcode == "tuple":
    roots = [fused.instructions[x] for x in fused.root.operands]
  return total + sum(_root_bytes(root, fused) for root in roots)


def _read(
  name: str, users: dict[str, list[tuple[int, hlo.Instruction]]], whole: int
) -> int:
  """Bytes that a fusion reads of a value."""
  total = 0
  for place, user in users.get(name, ()):
    if user.opcode in _SLICES and place == 0:
      total += _size(user)
    elif user.opcode in _SAME and users.get(user.name):
      total += _read(user.name, users, whole)
    elif user.opcode not in _IN_PLACE or place != 0:
      return whole
  return total


def _root_bytes(root: hlo.Instruction, fused: hlo.Computation) -> int:
  """Bytes that a fusion writes for a result."""
  inner = root
  while inner.opcode == "bitcast":
    inner = fused.instructions[inner.operands[0]]
  if inner.opcode == "parameter":
    return 0
  if inner.opcode == "dynamic-update-slice":
    return _size(fused.instructions[inner.operands[1]])
  if inner.opcode == "scatter":
    return 2 * _size(fused.instructions[inner.operands[2]])
  if inner.opcode == "custom-call":
    return _written(inner)
  if inner.opcode == "get-tuple-element":
    source = fused.instructions[inner.operands[0]]
    return 0 if _is_space(source, inner.arrays[0]) else _size(root)
  return _size(root)


def _written(instruction: hlo.Instruction) -> int:
  """Size of a result, without a library's workspace."""
  return sum(
    array.padded_bytes
    for array in instruction.arrays
    if array.in_main_memory and not _is_space(instruction, array)
  )


def _is_space(instruction: hlo.Instruction, array: hlo.Array) -> bool:
  target = custom_call(instruction)
  return target.startswith(_LIBRARIES) and array.dtype in ("s8", "u8")


def _size(instruction: hlo.Instruction) -> int:
  return sum(
    array.padded_bytes for array in instruction.arrays if array.in_main_memory
  )
