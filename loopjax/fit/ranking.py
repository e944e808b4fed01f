"""Ranks the parts of a compiled program by their time on a chip's roofline.

A kernel's time is at least its roofline: products at the chip's rate, arrays at
the memory's rate, and a launch. The sums rank what is worth optimising. They
are not times: kernels are slower by varying factors, and caches and concurrency
are not modelled.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from loopjax.fit import counts, hlo
from loopjax.fit.values import place

# Achievable fractions of data sheet rates: measured for large bfloat16 products
# and copies on one H200 (790 TFLOP/s, 4.3 TB/s), assumed for other chips.
COMPUTE_SHARE = 0.8
BANDWIDTH_SHARE = 0.9


class Rates(NamedTuple):
  """A chip's rates from its data sheet.

  Attributes:
    bf16: 10^12 operations per second of dense products with 16-bit inputs.
    tf32: the same for float32 inputs rounded to TF32, or on TPUs to bfloat16.
    f32: the same for float32 inputs that are not rounded; on TPUs six bfloat16
      products.
    memory: 10^9 bytes per second from main memory.
    network: 10^9 bytes per second received from other chips.
    launch: 10^-6 seconds to start a kernel; 0 on TPUs, which run a single
      program.
    source: source of the numbers.
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
  """Minimum time of a kernel: the longest of its parts.

  Operations are by dtype, a key of `counts.DTYPES`; bytes are those from and to
  main memory, and from other chips.
  """
  compute = sum(
    number / getattr(rates, dtype) for dtype, number in flops.items()
  )
  return rates.launch * 1e-6 + max(
    compute / (COMPUTE_SHARE * 1e12),
    num_bytes / (BANDWIDTH_SHARE * 1e9 * rates.memory),
    network_bytes / (BANDWIDTH_SHARE * 1e9 * rates.network),
  )


# The parts of a model, as named by `jax.named_scope`; the last is everything
# else.
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
    launches: number of kernels.
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
    """The same per step, for a number of steps."""
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
      bodies count once.
  """

  total: Work
  parts: dict[str, Work]
  lines: dict[str, Work]
  unseen: dict[str, float]
  rates: Rates | None
  asynchronous: dict[str, float]
  unknown: tuple[str, ...]


def rank(module: hlo.Module, kind: str, steps: int) -> Ranking:
  """Reads a compiled program.

  Args:
    module: the program.
    kind: the chip, a key of `RATES`; others have no times.
    steps: number of optimizer steps per call.
  """
  chip = RATES.get(kind)
  times, unknown = hlo.executions(module)
  total = NONE
  unseen: dict[str, float] = defaultdict(float)
  parts: dict[str, Work] = {}
  lines: dict[str, Work] = {}
  asynchronous: dict[str, float] = defaultdict(float)
  for name in hlo.executed(module):
    for instruction in module.computations[name].instructions.values():
      if not counts.launches(instruction):
        continue
      inside = _inside(module, name, instruction)
      with_product = [(one, product) for one, product in inside if product]
      calls = [one for one, _ in inside if counts.custom_call(one)]
      if with_product:  # The largest product says what a kernel is.
        telling = max(with_product, key=lambda pair: pair[1].flops)[0]
      else:
        telling = calls[-1] if calls else instruction
        if target := counts.custom_call(telling):
          unseen[target] += times[name] / steps
      num_bytes = counts.num_bytes(module, name, instruction)
      products = [product for _, product in with_product]
      work = _work(instruction, products, num_bytes, chip, times[name])
      work = work.over(steps)
      kind_of = instruction.opcode.removesuffix("-start")
      starts = kind_of in counts.KINDS and kind_of != instruction.opcode
      if starts and '"is_sync":true' not in instruction.attributes:
        asynchronous[kind_of] += times[name] / steps
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
  """The innermost part of the model in an operation's name."""
  names = [x for x in re.findall(r"\w+", op_name) if x in PARTS]
  return names[-1] if names else REST


def _work(
  instruction: hlo.Instruction,
  products: Iterable[counts.Product],
  num_bytes: int,
  chip: Rates | None,
  number: int,
) -> Work:
  """A kernel that runs this many times."""
  flops: dict[str, float] = defaultdict(float)
  for product in products:
    flops[product.dtype] += product.flops
  received = 0
  if instruction.opcode.removesuffix("-start") in counts.KINDS:
    received = max(array.num_bytes for array in instruction.arrays)
  bound = seconds(chip, flops, num_bytes, received) if chip else 0.0
  many = {dtype: number * x for dtype, x in flops.items()}
  return Work(number, number * num_bytes, many, number * bound)


def _inside(
  module: hlo.Module, name: str, instruction: hlo.Instruction
) -> list[tuple[hlo.Instruction, counts.Product | None]]:
  """A kernel's instructions, those that it fuses or itself, and products."""
  instructions = module.computations[name].instructions
  if instruction.opcode not in ("fusion", "fusion-start"):
    return [(instruction, counts.product(instruction, instructions))]
  callee = dict(instruction.called)["calls"]
  return [
    pair
    for inner in module.computations[callee].instructions.values()
    for pair in _inside(module, callee, inner)
  ]
