"""Ranks the parts of a compiled program by their time on a chip's roofline.

Every kernel takes at least as long as the roofline says: its products at the
chip's rate, its arrays at the memory's, and a launch. The sum ranks what is
worth changing. It is not a time: kernels are slower, by varying factors, and
caches and concurrency are not modelled.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from loopjax.fit import rates as rates_lib
from loopjax.fit.counts import collectives, executions, hlo, products, traffic
from loopjax.fit.counts.values import place

# The parts of a model, as `jax.named_scope` names them; what is in none of them
# is the last.
PARTS = (
  "attention",
  "mlp",
  "fast_weights",
  "gated_kv",
  "memory",
  "channel",
  "gate",
  "halting",
  "read_out",
  "parameters",
  "optimizer",
)
REST = "the rest"


class Work(NamedTuple):
  """Kernels, in one call of a program.

  Attributes:
    launches: how many.
    num_bytes: from and to main memory.
    flops: of products, by dtype.
    seconds: the sum of their minimum times; 0 without rates.
  """

  launches: float
  num_bytes: float
  flops: Mapping[str, float]
  seconds: float

  def __add__(self, other: Any) -> "Work":
    flops = dict(self.flops)
    for dtype, number in other.flops.items():
      flops[dtype] = flops.get(dtype, 0) + number
    return Work(
      self.launches + other.launches,
      self.num_bytes + other.num_bytes,
      flops,
      self.seconds + other.seconds,
    )

  def over(self, number: int) -> "Work":
    """That of each of a number of steps."""
    return Work(
      self.launches / number,
      self.num_bytes / number,
      {dtype: x / number for dtype, x in self.flops.items()},
      self.seconds / number,
    )


NONE = Work(0, 0, {}, 0.0)


class Ranking(NamedTuple):
  """One optimizer step on one chip.

  Attributes:
    total: all kernels.
    parts: by part of the model.
    lines: by line of Python and operation.
    unseen: custom calls whose operations are unknown: launches by target.
    rates: of the chip; None if it is not in the table.
    asynchronous: collectives that overlap with kernels, by kind.
    unknown: loops whose number of iterations is only known at run time; their
      contents count once.
  """

  total: Work
  parts: dict[str, Work]
  lines: dict[str, Work]
  unseen: dict[str, float]
  rates: rates_lib.Rates | None
  asynchronous: dict[str, float]
  unknown: tuple[str, ...] = ()


def rank(module: hlo.Module, kind: str, steps: int) -> Ranking:
  """Reads a compiled program.

  Args:
    module: the program.
    kind: of the chip, a key of `rates.RATES`, or another without times.
    steps: optimizer steps of one call.
  """
  chip = rates_lib.RATES.get(kind)
  times, unknown = executions.counts(module)
  total = NONE
  unseen: dict[str, float] = defaultdict(float)
  parts: dict[str, Work] = {}
  lines: dict[str, Work] = {}
  asynchronous: dict[str, float] = defaultdict(float)
  for name in executions.executed(module):
    for instruction in module.computations[name].instructions.values():
      if not traffic.launches(instruction):
        continue
      number = times[name]
      work = _work(module, name, instruction, chip, number).over(steps)
      telling, found = _inside(module, name, instruction)
      target = products.custom_call(telling)
      if target and not found:
        unseen[target] += number / steps
      kind_of = instruction.opcode.removesuffix("-start")
      starts = kind_of in collectives.KINDS and kind_of != instruction.opcode
      if starts and '"is_sync":true' not in instruction.attributes:
        asynchronous[kind_of] += number / steps
      total += work
      part = part_of(telling.op_name or instruction.op_name)
      parts[part] = parts.get(part, NONE) + work
      line = place(module, telling) or place(module, instruction)
      line = line or instruction.opcode
      lines[line] = lines.get(line, NONE) + work
  return Ranking(
    total, parts, lines, dict(unseen), chip, dict(asynchronous), unknown
  )


def part_of(op_name: str) -> str:
  """The innermost part of the model that an operation's name is in."""
  names = [x for x in re.findall(r"\w+", op_name) if x in PARTS]
  return names[-1] if names else REST


def _work(
  module: hlo.Module,
  name: str,
  instruction: hlo.Instruction,
  chip: rates_lib.Rates | None,
  number: int,
) -> Work:
  flops: dict[str, float] = defaultdict(float)
  for product in _products(module, name, instruction):
    flops[product.dtype] += product.flops
  num_bytes = traffic.num_bytes(module, name, instruction)
  received = 0
  if instruction.opcode.removesuffix("-start") in collectives.KINDS:
    received = max(array.num_bytes for array in instruction.arrays)
  least = 0.0
  if chip:
    least = rates_lib.seconds(chip, flops, num_bytes, received)
  many = {dtype: number * x for dtype, x in flops.items()}
  return Work(number, number * num_bytes, many, number * least)


def _products(
  module: hlo.Module, name: str, instruction: hlo.Instruction
) -> list[products.Product]:
  """The products of an instruction, also of what it fuses."""
  own = products.product(instruction, module.computations[name].instructions)
  found = [own] if own else []
  if instruction.opcode in ("fusion", "fusion-start"):
    callee = dict(instruction.called)["calls"]
    for inner in module.computations[callee].instructions.values():
      found += _products(module, callee, inner)
  return found


def _inside(
  module: hlo.Module, name: str, instruction: hlo.Instruction
) -> tuple[hlo.Instruction, bool]:
  """What names a kernel: its largest product, or itself; whether it has one."""
  best, most = instruction, 0
  computations = [name]
  if instruction.opcode in ("fusion", "fusion-start"):
    computations = [dict(instruction.called)["calls"]]
  for computation in computations:
    instructions = module.computations[computation].instructions
    inner = [instruction] if computation == name else instructions.values()
    for one in inner:
      if one.opcode == "fusion":
        computations.append(dict(one.called)["calls"])
      found = products.product(one, instructions)
      if found and found.flops > most:
        best, most = one, found.flops
      elif not most and products.custom_call(one):
        best = one
  return best, bool(most)
