"""The largest values of a program, and the Python lines they come from.

The compiler's buffer assignment is not available without the chip. A value here
is the result of an instruction; values may share memory at different times:
their sum is not the program's memory.
"""

import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from loopjax.fit import hlo

_PACKAGE = pathlib.Path(__file__).parents[1]  # loopjax
# Instructions whose results alias another value or take no memory.
_NO_VALUE = (
  "bitcast",
  "call",
  "conditional",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "tuple",
  "while",
)
# Operations that only move a value; their names are uninformative.
_MOVES = ("broadcast_in_dim", "closed_call", "dynamic_update_slice", "while")
_FORWARDS = (
  "bitcast",
  "convert",
  "copy",
  "copy-done",
  "copy-start",
  "reshape",
  "transpose",
)


class Value(NamedTuple):
  """Values of one dtype, shape and origin.

  Attributes:
    number: number of values.
    num_bytes: size of one value on one chip, with padding.
    array: dtype and dimensions on one chip.
    origin: name of the argument, or file:line and operation.
    stacked: whether a loop writes one row per step.
  """

  number: int
  num_bytes: int
  array: str
  origin: str
  stacked: bool


class _Path(NamedTuple):
  """The path from a value back to the origin of its content.

  Attributes:
    instructions: instructions on the path; enclosing fusions come last.
    stacked: whether a row is written into a larger array on the path.
    filled: whether the content is a constant, or uninitialised.
  """

  instructions: list[hlo.Instruction]
  stacked: bool
  filled: bool


def largest(module: hlo.Module, num: int) -> list[Value]:
  """The `num` kinds of values with the largest total size."""
  counts: Counter[tuple[int, str, str, bool]] = Counter()
  fills: Counter[tuple[int, str, str, bool]] = Counter()
  for name in hlo.executed(module, asynchronous=False):
    for instruction in module.computations[name].instructions.values():
      for element, array in _results(module, name, instruction):
        path = _path(module, name, instruction, element)
        text = _origin(module, path)
        row = (array.padded_bytes, str(array), text, path.stacked)
        (fills if path.filled else counts)[row] += 1
  # Stacks are initialised to zeros, and count where rows are written.
  stacks = {array for _, array, _, stacked in counts if stacked}
  counts.update({row: n for row, n in fills.items() if row[1] not in stacks})
  values = [Value(number, *row) for row, number in counts.items()]
  values.sort(key=lambda value: (-value.number * value.num_bytes, value.array))
  return values[:num]


def _results(
  module: hlo.Module, name: str, instruction: hlo.Instruction
) -> Iterator[tuple[int, hlo.Array]]:
  """The results that an instruction writes to the chip's main memory."""
  argument = instruction.opcode == "parameter" and name == module.entry
  if instruction.opcode in _NO_VALUE and not argument:
    return
  if instruction.opcode.endswith("-start"):
    return  # Its "done" has the result.
  for element, array in enumerate(instruction.arrays):
    if array.in_main_memory:
      yield element, array


def _path(
  module: hlo.Module, name: str, instruction: hlo.Instruction, element: int
) -> _Path:
  """Follows element `element` of an instruction of computation `name`."""
  path, fusions, stacked = [], [], False
  inside: list[tuple[str, hlo.Instruction]] = []  # Enclosing fusions.
  while True:
    if instruction.opcode == "fusion":
      fusions.append(instruction)
      inside.append((name, instruction))
      name = dict(instruction.called)["calls"]
      instruction = module.computations[name].root
      if instruction.opcode == "tuple":
        operand = instruction.operands[element]
        instruction = module.computations[name].instructions[operand]
      continue
    path.append(instruction)
    following = 0
    if instruction.opcode == "dynamic-update-slice":
      stacked, following = True, 1
    elif instruction.opcode == "get-tuple-element":
      element = instruction.element
    elif instruction.opcode == "while":
      name = dict(instruction.called)["body"]
      instruction, following = module.computations[name].root, element
    elif instruction.opcode == "parameter" and inside:
      following = int(instruction.arguments)
      name, instruction = inside.pop()
    elif instruction.opcode not in _FORWARDS:
      break
    operand = instruction.operands[following]
    instruction = module.computations[name].instructions[operand]
  filled = instruction.opcode in ("broadcast", "constant")
  filled |= "AllocateBuffer" in instruction.attributes
  return _Path(path + fusions, stacked, filled and not stacked)


def _origin(module: hlo.Module, way: _Path) -> str:
  """The first instruction on the path with an informative name."""
  named = [i for i in way.instructions if i.op_name]
  telling = [i for i in named if i.op_name.split("/")[-1] not in _MOVES]
  if not named:
    return way.instructions[0].name
  instruction = (telling or named)[0]
  return place(module, instruction) or instruction.op_name


def place(module: hlo.Module, instruction: hlo.Instruction) -> str:
  """File, line and operation of an instruction; "" if unknown.

  The line is the innermost one in loopjax, or else the innermost one.
  """
  frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
  sources = module.sources.get(int(frame[1]), ()) if frame else ()
  if not sources:
    return ""
  ours = [s for s in sources if pathlib.Path(s[0]).is_relative_to(_PACKAGE)]
  path, line = (ours or sources)[0]
  file = pathlib.Path(path)
  within = file.relative_to(_PACKAGE.parent) if ours else file.name
  backward = ", backward" if "transpose(" in instruction.op_name else ""
  operation = instruction.op_name.split("/")[-1]
  return f"{within}:{line} {operation}{backward}"
