"""Bytes that a program moves between chips, and from and to main memory.

For main memory, each operand is read once and each result written once. If an
operand is only sliced, only the slices count; if a result updates an operand in
place, only the update counts.
"""

import re
from collections import Counter
from typing import NamedTuple

from loopjax.fit.counts import hlo, products

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
  found: dict[str, tuple[int, str, int]] = {}
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
      found[key] = max(found.get(key, one), one)
  number_of: Counter[str] = Counter()
  num_bytes: Counter[str] = Counter()
  for number, kind, size in found.values():
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
  return products.custom_call(instruction) not in _NO_KERNEL


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
  instructions: products.Instructions,
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
  name: str,
  users: dict[str, list[tuple[int, hlo.Instruction]]],
  whole: int,
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
  target = products.custom_call(instruction)
  return target.startswith(_LIBRARIES) and array.dtype in ("s8", "u8")


def _size(instruction: hlo.Instruction) -> int:
  return sum(
    array.padded_bytes for array in instruction.arrays if array.in_main_memory
  )
