"""What a compiled train step does, part by part, beside a chip's two bounds.

  python benchmarks/roofline.py --config=configs/sudoku_utm.py:gpu --chip=h200:1

Compiles the step for the chip, which need not be here (`pip install
'loopjax[fit]'`), and reads the text of the program. For one optimizer step on
one chip it prints kernels, bytes, operations and collectives, each as often as
its loops run, and how long the chip needs at least for the operations and for
the bytes. Nothing is run: kernels take longer, by varying factors.

Operations are of products only: `dot`; `convolution` on TPUs; calls of cuBLAS,
cuDNN's attention and Pallas. Moving their arrays dominates the time of others.

Bytes are from and to main memory: each operand is read once and each result is
written once. If an operand is only sliced, only the slices count; if a result
updates an operand in place, only the update counts.
"""

import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from loopjax.commands import command_line, document
from loopjax.errors import UserError, leave, one_line_errors
from loopjax.fit import ENVIRONMENT

_HEADER = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)=\{?(%[\w.-]+(?:, %[\w.-]+)*)"
)


class Array(NamedTuple):
  """An array of a result, on one device; `dtype` as HLO writes it."""

  dtype: str
  dims: tuple[int, ...]
  num_bytes: int  # Of the elements.
  padded_bytes: int  # In main memory, in whole tiles; 0 in another memory.


class Instruction(NamedTuple):
  """An instruction: a line of the text."""

  name: str
  opcode: str
  arrays: tuple[Array, ...]  # Of the result, nested tuples flattened.
  arguments: str  # Between the parentheses.
  operands: tuple[str, ...]  # Names of the instructions whose results it uses.
  called: tuple[tuple[str, str], ...]  # (role, name) of computations.
  attributes: str  # After the parentheses.
  op_name: str  # Name of the original JAX operation, or "".
  target: str  # Of a custom call, or "".
  element: int  # Index of a get-tuple-element.


Instructions = Mapping[str, Instruction]


class Computation(NamedTuple):
  """A computation: instructions by name, and the root instruction."""

  instructions: dict[str, Instruction]
  root: Instruction


class Module(NamedTuple):
  """A program: computations, called ones first, and the entry's name."""

  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Module:
  """Parses `compiled.as_text()`: computations, each of instructions

  %name = f32[8,128]{1,0} opcode(%operand, ...), attribute=..., metadata={...}
  """
  computations: dict[str, Computation] = {}
  instructions: dict[str, Instruction] = {}
  entry, current, root = "", "", None
  # The attributes of a kernel may span lines.
  for line in re.sub(r'\n(?="|\}\})', " ", text).splitlines():
    if header := _HEADER.match(line):
      current, instructions, root = header[2], {}, None
      entry = current if header[1] else entry
    elif line.startswith("}") and current:
      assert root, f"{current} has no root"
      computations[current] = Computation(instructions, root)
      current = ""
    elif current and (match := _INSTRUCTION.match(line)):
      instructions[match[2]] = _instruction(match[2], match[3])
      root = instructions[match[2]] if match[1] else root
  assert entry, "no entry computation"
  return Module(computations, entry)


def arrays(shape: str) -> Iterator[Array]:
  """The arrays in the text of a shape."""
  for dtype, sizes, layout in _ARRAY.findall(shape):
    dims = tuple(map(int, re.findall(r"\d+", sizes)))  # <=8 counts as 8.
    order, _, rest = layout.partition(":")
    padded = dims
    if tile := re.match(r"T\(([\d,]+)\)", rest):
      tiles = [int(size) for size in tile[1].split(",")]
      major_to_minor = [int(i) for i in order.split(",") if i][::-1]
      padded = (1,) * len(tiles) + tuple(dims[i] for i in major_to_minor)
      last = zip(padded[-len(tiles) :], tiles, strict=True)
      padded = padded[: -len(tiles)] + tuple(-(-d // t) * t for d, t in last)
    elsewhere = re.search(r"S\([1-9]", layout)
    stored = 0 if elsewhere else _num_bytes(dtype, padded)
    yield Array(dtype, dims, _num_bytes(dtype, dims), stored)


def _num_bytes(dtype: str, dims: tuple[int, ...]) -> int:
  bits = {"pred": "8", "token": "0", "opaque": "0"}.get(dtype)
  bits = bits or _found(r"^[a-z]+(\d+)", dtype)
  return -(-int(bits) * math.prod(dims) // 8)


def _found(pattern: str, text: str, default: str = "") -> str:
  """The group of the first match."""
  match = re.search(pattern, text)
  return match[1] if match else default


def _instruction(name: str, text: str) -> Instruction:
  shape_end = _closing(text, 0) if text.startswith("(") else 0
  opcode = re.compile(r" ([a-z][\w-]*)\(").search(text, shape_end)
  assert opcode, f"no opcode in {name}"
  close = _closing(text, opcode.end() - 1)
  arguments, attributes = text[opcode.end() : close - 1], text[close:]
  called = tuple(
    (role, callee[1:])
    for role, callees in _CALLED.findall(attributes)
    for callee in callees.split(", ")
  )
  op_name = _found(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
  target = _found(r'custom_call_target="([^"]*)"', attributes)
  return Instruction(
    name, opcode[1], tuple(arrays(text[: opcode.start()])), arguments,
    tuple(re.findall(r"%([\w.-]+)", arguments)), called, attributes,
    op_name.replace("\\'", "'"), target if opcode[1] == "custom-call" else "",
    int(_found(r"\bindex=(\d+)", attributes, default="0")),
  )  # fmt: skip


def _closing(text: str, start: int) -> int:
  """Position after the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.end()
  raise AssertionError(f"unbalanced: {text[:80]}")


def trip_count(module: Module, caller: str, loop: Instruction) -> int | None:
  """Number of iterations of a while loop; None if unknown.

  XLA annotates it for CPUs and GPUs. For TPUs, it is derived from the loops of
  `jax.lax.scan`: a counter from a constant, in steps of a constant, to below a
  constant.
  """
  if known := _found(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
    return int(known)
  called = dict(loop.called)
  condition = module.computations[called["condition"]]
  body = module.computations[called["body"]]
  outer = module.computations[caller].instructions
  test, initial = condition.root, outer[loop.operands[0]]
  if test.opcode != "compare" or "direction=LT" not in test.attributes:
    return None
  counter = _original(condition.instructions, test.operands[0])
  forms = counter.opcode, initial.opcode, body.root.opcode
  if forms != ("get-tuple-element", "tuple", "tuple"):
    return None
  added = _original(body.instructions, body.root.operands[counter.element])
  if added.opcode != "add":
    return None
  before = _original(body.instructions, added.operands[0])
  if before.opcode != "get-tuple-element" or before.element != counter.element:
    return None
  constants = (
    _original(outer, initial.operands[counter.element]),
    _original(condition.instructions, test.operands[1]),
    _original(body.instructions, added.operands[1]),
  )
  texts = [x.arguments for x in constants if x.opcode == "constant"]
  integers = [int(x) for x in texts if re.fullmatch(r"-?\d+", x)]
  if len(integers) < len(constants):
    return None
  start, end, step = integers
  return max(0, -(-(end - start) // step)) if step else None


def _original(instructions: Instructions, name: str) -> Instruction:
  """The instruction itself, or the source that it copies."""
  instruction = instructions[name]
  while instruction.opcode == "copy":
    instruction = instructions[instruction.operands[0]]
  return instruction


class Executions(NamedTuple):
  """How often computations run in one call of a program.

  Those of fusions and reductions count as often as their callers. All branches
  of a condition count as taken, the body of a loop of unknown length counts
  once, the condition of a loop of known length does not count.
  """

  times: Counter[str]
  separate: set[str]  # Their instructions run as kernels, not in a fusion.
  unknown: list[str]  # Loops of unknown length.


def executions(module: Module) -> Executions:
  """Follows all calls from the entry."""
  result = Executions(Counter({module.entry: 1}), {module.entry}, [])
  for name in reversed(module.computations):  # Callers first.
    number = result.times[name]
    for instruction in module.computations[name].instructions.values():
      opcode, trips, skipped = instruction.opcode, 1, ""
      if not number or opcode in ("async-update", "async-done"):
        continue  # The latter count at the start operation.
      if opcode == "while":
        known = trip_count(module, name, instruction)
        if known is None:
          result.unknown.append(instruction.op_name or instruction.name)
        else:
          trips, skipped = known, "condition"
      callers = ("call", "conditional", "while", "async-start")
      for role, callee in instruction.called:
        if name in result.separate and opcode in callers:
          result.separate.add(callee)
        if role != skipped:
          result.times[callee] += number * trips
  return result


# By the widest operand: up to 16 bits; float32, rounded by chips; not rounded.
DTYPES = ("bf16", "tf32", "f32")
_PRODUCTS = "__cublas", "__triton_gemm"
_BITS = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}


def product(
  instruction: Instruction, instructions: Instructions
) -> tuple[str, int] | None:
  """(one of DTYPES, multiplications and additions) of a product, or None."""
  target, attributes = instruction.target, instruction.attributes
  operands = [instructions[x].arrays[:1] for x in instruction.operands[:2]]
  if instruction.opcode == "dot" or target.startswith(_PRODUCTS):
    axes = _found(r'lhs_contracting_dim\w+"?[:=]\s*[\[{]([\d", ]*)', attributes)
    summed = map(int, re.findall(r"\d+", axes))
    depth = math.prod(operands[0][0].dims[axis] for axis in summed)
    flops = 2 * math.prod(instruction.arrays[0].dims) * depth
  elif instruction.opcode == "convolution":
    flops = _convolution(instruction, instructions)
  elif target.startswith("__cudnn$fmha"):
    # Pairs [B, N, T, S] of queries and keys of width H.
    shape = r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([\d", ]+)\]'
    pairs = _found(shape, attributes, default="0")
    flops = 2 * math.prod(map(int, re.findall(r"\d+", pairs)))
    flops *= operands[0][0].dims[-1] * (5 if "Backward" in target else 2)
    flops //= 2 if "CAUSAL" in attributes else 1
  else:
    flops = int(_found(r'"flops":\s*"?(\d+)', attributes, "0")) * bool(target)
  if not flops:
    return None
  widest = max(_BITS.get(array.dtype, 0) for one in operands for array in one)
  if widest <= 16:
    return "bf16", flops
  precise = re.search(r"operand_precision[^\]}]*highest", attributes, re.I)
  return "f32" if precise or widest > 32 else "tf32", flops


def _convolution(instruction: Instruction, instructions: Instructions) -> int:
  """Convolutions, as which TPUs write products; windows have one element."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  assert labels, instruction.name
  window = _found(r"window=\{([^}]*)\}", instruction.attributes)
  left, right = (instructions[x].arrays[0].dims for x in instruction.operands)
  result = instruction.arrays[0].dims
  flops = 2 * right[labels[2].index("i")]
  for place, axis in enumerate(labels[3]):
    if not axis.isdigit():
      flops *= result[place]
      continue

    def entry(key: str, default: int, at: int = int(axis)) -> int:
      # For a pad, the low padding.
      one = _found(rf"\b{key}=([-\d_x]+)", window)
      return int(one.split("x")[at].split("_")[0]) if one else default

    # Pairs of result and window elements that meet an operand's element.
    spread, reach = entry("lhs_dilate", 1), entry("rhs_dilate", 1)
    meets = np.arange(result[place]) * entry("stride", 1) - entry("pad", 0)
    beside = np.arange(right[labels[2].index(axis)]) * reach
    meets = meets[:, None] + beside
    last = (left[labels[1].index(axis)] - 1) * spread
    inside = (meets >= 0) & (meets <= last) & (meets % spread == 0)
    flops *= int(np.sum(inside))
  return flops


_SLICES = ("dynamic-slice", "gather", "slice")
# Opcodes that pass on all elements, in a fusion.
_SAME = ("bitcast", "convert", "copy", "reshape", "transpose")
# Instructions that move nothing; also every "-done", and "async-start", whose
# computation counts.
_FREE = (
  "add-dependency", "after-all", "async-start", "bitcast", "call",
  "conditional", "constant", "get-tuple-element", "opt-barrier", "parameter",
  "partition-id", "replica-id", "tuple", "while",
)  # fmt: skip
# Custom calls that are not kernels.
_NO_KERNEL = ("AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")


def num_bytes(module: Module, name: str, instruction: Instruction) -> int:
  """Bytes that an instruction of computation `name` reads and writes."""
  instructions = module.computations[name].instructions
  opcode = instruction.opcode
  operands = [_size(instructions[x]) for x in instruction.operands]
  if opcode in ("fusion", "fusion-start"):
    fused = module.computations[dict(instruction.called)["calls"]]
    return _fusion_bytes(fused, operands)
  if opcode == "copy-start":  # (destination, source, context).
    return sum(operands) + instruction.arrays[0].padded_bytes
  if opcode.endswith("-start"):  # (operands, results, ...).
    return sum(operands) + max(x.padded_bytes for x in instruction.arrays)
  if opcode in _SLICES:
    return 2 * _size(instruction) + sum(operands[1:])
  if opcode == "dynamic-update-slice":
    return 2 * operands[1]
  if opcode == "scatter":
    return sum(operands[1:]) + operands[2]
  return sum(operands) + _size(instruction)


def _size(instruction: Instruction, of: Instruction | None = None) -> int:
  """Bytes of a result, of instruction `of` if given, without its workspace."""
  library = (of or instruction).target.startswith(("__cublas", "__cudnn"))
  return sum(
    array.padded_bytes
    for array in instruction.arrays
    if not library or array.dtype not in ("s8", "u8")
  )


def _fusion_bytes(fused: Computation, operands: list[int]) -> int:
  """Bytes that a fusion of operands of these sizes reads and writes."""
  users: dict[str, list[tuple[int, Instruction]]] = defaultdict(list)
  for user in fused.instructions.values():
    for place, operand in enumerate(user.operands):
      users[operand].append((place, user))

  def read(name: str, whole: int) -> int:
    total = 0
    for place, user in users[name]:
      if user.opcode in _SLICES and place == 0:
        total += _size(user)
      elif user.opcode in _SAME and users[user.name]:
        total += read(user.name, whole)
      elif user.opcode not in ("dynamic-update-slice", "scatter") or place:
        return whole
    return min(whole, total)

  def written(root: Instruction) -> int:
    inner = root
    while inner.opcode == "bitcast":
      inner = fused.instructions[inner.operands[0]]
    before = [fused.instructions[name] for name in inner.operands]
    if inner.opcode == "parameter":
      return 0
    if inner.opcode == "dynamic-update-slice":
      return _size(before[1])
    if inner.opcode == "scatter":
      return 2 * _size(before[2])
    if inner.opcode == "get-tuple-element":
      return _size(inner, before[0])
    return _size(inner if inner.target else root)

  roots = [fused.root]
  if fused.root.opcode == "tuple":
    roots = [fused.instructions[x] for x in fused.root.operands]
  return sum(map(written, roots)) + sum(
    read(inner.name, operands[int(inner.arguments)])
    for inner in fused.instructions.values()
    if inner.opcode == "parameter"
  )


KINDS = (
  "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
  "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip


class Traffic(NamedTuple):
  """Collectives of one call, by kind; results on one chip, without padding."""

  executions: Counter[str]
  num_bytes: Counter[str]
  parts: Counter[tuple[str, str]]  # Bytes by kind and part of the model.


def collectives(module: Module) -> Traffic:
  """Counts collectives, multiplied by the iterations of enclosing loops.

  An asynchronous collective counts at its "done", because the result of its
  "start" also contains the operands. Libtpu spreads a collective over a chain
  of fusions, and writes a reduce-scatter as a fusion that begins with an
  all-reduce.
  """
  times = executions(module).times
  totals: dict[str, tuple[int, str, int, str]] = {}
  for name, computation in module.computations.items():
    scatter = name.startswith("all-reduce-scatter")
    for instruction in computation.instructions.values():
      kind = instruction.opcode.removesuffix("-done")
      if kind not in KINDS or not times[name]:
        continue
      whole = computation.root if scatter else instruction
      size = sum(array.num_bytes for array in whole.arrays)
      kind = "reduce-scatter" if scatter else kind
      one = (times[name], kind, size, part_of(instruction.op_name))
      chain = _found(r'\b(chain_id="\d+")', instruction.attributes)
      key = chain or f"{name}/{instruction.name}"
      totals[key] = max(totals.get(key, one), one)
  result = Traffic(Counter(), Counter(), Counter())
  for number, kind, size, part in totals.values():
    result.executions[kind] += number
    result.num_bytes[kind] += number * size
    result.parts[kind, part] += number * size
  return result


# A chip's 10^12 operations per second of dense products (float32 is rounded to
# TF32 or bfloat16; unrounded, it takes six on TPUs) and 10^9 bytes per
# second from main memory: resources.nvidia.com, data sheets of H100 and H200
# (SXM, dense); cloud.google.com/tpu/docs.
RATES = {
  "h100": {"bf16": 989.4, "tf32": 494.7, "f32": 66.9, "bytes": 3350},
  "h200": {"bf16": 989.4, "tf32": 494.7, "f32": 66.9, "bytes": 4800},
  "v5e": {"bf16": 197, "tf32": 197, "f32": 197 / 6, "bytes": 819},
  "v5p": {"bf16": 459, "tf32": 459, "f32": 459 / 6, "bytes": 2765},
  "v6e": {"bf16": 918, "tf32": 918, "f32": 918 / 6, "bytes": 1640},
}
# The parts of a model, as named by `jax.named_scope`, and everything else.
PARTS = (
  "attention", "mlp", "fast_weights", "gated_kv", "memory", "channel", "gate",
  "halting", "read_out", "parameters", "optimizer",
)  # fmt: skip
REST = "the rest"

# Of kernels: their number, "bytes", and operations by dtype.
Work = Counter[str]


class Counts(NamedTuple):
  """What a program does in one optimizer step on one chip."""

  total: Work
  parts: dict[str, Work]
  operations: dict[str, Work]  # By part and JAX operation.
  unseen: Counter[str]  # Kernels of unknown operations, by custom call.
  unknown: list[str]  # Loops of unknown length; their bodies count once.


def count(module: Module, steps: int = 1) -> Counts:
  """Counts a program that computes this many optimizer steps per call."""
  times, separate, unknown = executions(module)
  parts, operations = defaultdict(Counter), defaultdict(Counter)
  result = Counts(Counter(), parts, operations, Counter(), unknown)
  for name in filter(separate.__contains__, module.computations):
    for instruction in module.computations[name].instructions.values():
      opcode, target = instruction.opcode, instruction.target
      done = opcode.endswith(("-done", "-update"))
      if done or opcode in _FREE or target in _NO_KERNEL:
        continue
      many = times[name] / steps
      moved = num_bytes(module, name, instruction)
      work = Counter({"kernels": many, "bytes": many * moved})
      telling, largest = instruction, 0  # The largest product says what it is.
      for inner, found in _inside(module, name, instruction):
        dtype, flops = found or ("", 0)
        work[dtype] += many * flops
        if flops > largest or inner.target and not largest:
          telling, largest = inner, flops
      if telling.target and not largest:
        result.unseen[telling.target] += many
      op_name = telling.op_name or instruction.op_name
      part = part_of(op_name)
      operation = op_name.split("/")[-1] or instruction.opcode
      backward = ", backward" if "transpose(" in op_name else ""
      result.total.update(work)
      parts[part].update(work)
      operations[f"{part}: {operation}{backward}"].update(work)
  return result


def part_of(op_name: str) -> str:
  """The innermost part of the model in an operation's name."""
  names = [x for x in re.findall(r"\w+", op_name) if x in PARTS]
  return names[-1] if names else REST


def _inside(
  module: Module, name: str, instruction: Instruction
) -> Iterator[tuple[Instruction, Any]]:
  """A kernel's instructions, those that it fuses or itself, and products."""
  if instruction.opcode not in ("fusion", "fusion-start"):
    instructions = module.computations[name].instructions
    yield instruction, product(instruction, instructions)
    return
  callee = dict(instruction.called)["calls"]
  for inner in module.computations[callee].instructions.values():
    yield from _inside(module, callee, inner)


def bounds(work: Work, rates: Mapping[str, float]) -> tuple[float, float]:
  """Seconds that a chip needs at least: for the operations, for the bytes."""
  operations = sum(work[dtype] / rates[dtype] for dtype in DTYPES)
  return operations / 1e12, work["bytes"] / rates["bytes"] / 1e9


def table(title: str, works: Mapping[str, Work], chip: str) -> str:
  """The twenty heaviest, by the longer bound; without rates by the H200's."""
  rates = RATES.get(chip, RATES["h200"])
  ranked = sorted(works.items(), key=lambda x: -max(bounds(x[1], rates)))
  rows = [(title, "kernels", "MiB", "TFLOP", "float32", "ms FLOPs", "ms bytes")]
  for name, work in ranked[:20]:
    wide = work["tf32"] + work["f32"]
    flops = wide + work["bf16"]
    kernels, mib = f"{work['kernels']:,.0f}", f"{work['bytes'] / 2**20:,.1f}"
    share, tera = f"{wide / max(1, flops):.1%}", f"{flops / 1e12:.3g}"
    times = (
      f"{1e3 * x:.3g}" if chip in RATES else "?" for x in bounds(work, rates)
    )
    rows.append((name, kernels, mib, tera, share, *times))
  return document.aligned(rows, num_left=1)


def page(counts: Counts, traffic: Traffic, chip: str, steps: int) -> str:
  """All counts of a step; `traffic` is of a call, of this many steps."""
  lines = [table("part", {"all": counts.total, **counts.parts}, chip), ""]
  lines += [table("operation", counts.operations, chip), ""]
  for kind, number in sorted(traffic.executions.items()):
    parts = ", ".join(
      f"{part} {size / steps / 2**20:,.1f}"
      for (one, part), size in traffic.parts.most_common()
      if one == kind
    )
    lines.append(f"{number / steps:g} x {kind}: MiB of results: {parts}")
  for target, number in sorted(counts.unseen.items()):
    lines.append(f"{number:,.0f} x {target}: operations not counted")
  for loop in counts.unknown:
    lines.append(f"counted once, because its length is unknown: {loop}")
  return "\n".join(lines)


def main(words: list[str]) -> int:
  """Compiles, counts and prints; returns the exit status."""
  from loopjax import config as config_lib
  from loopjax.fit import measure, topology

  parser = command_line.ConfigParser("roofline.py", __doc__ or "")
  parser.add_argument("--chip", default="h200:1", help="h200:1, v5e:4x4, cpu:8")
  options = parser.parse_config(words)
  if options.config is None:
    raise UserError("--config=FILE is required")
  chip = options.chip.partition(":")[0]
  machine = topology.absent(options.chip, 1e6 if chip == "cpu" else 0.0)
  settings = config_lib.resolve(options.config)
  print(measure.headline(settings, machine), flush=True)
  measured = measure.measure(settings, machine)
  print(measure.page(machine, measured), end="\n\n")
  if measured.compiled is None:
    return 1
  module = parse(measured.compiled.as_text())
  steps = settings.run.steps_per_call
  print(page(count(module, steps), collectives(module), chip, steps))
  return 0


if __name__ == "__main__":
  os.environ.update(ENVIRONMENT)
  leave(one_line_errors(main)(sys.argv[1:]))
