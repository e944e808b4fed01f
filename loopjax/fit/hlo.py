"""Parses the text of a compiled program (optimised HLO) as far as needed.

The text holds computations, each a list of instructions

  %name = f32[8,128]{1,0} opcode(%operand, ...), attribute=..., metadata={...}

and called computations come before their callers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)=\{?(%[\w.-]+(?:, %[\w.-]+)*)"
)


class Array(NamedTuple):
  """An array within a shape.

  Attributes:
    dtype: as HLO writes it: f32, bf16, s32, pred, ...
    dims: dimensions of the array on one device.
    layout: text in braces: order of the dimensions, tiles, memory space.
  """

  dtype: str
  dims: tuple[int, ...]
  layout: str

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"

  @property
  def num_bytes(self) -> int:
    """Bytes of the elements."""
    return _num_bytes(self.dtype, self.dims)

  @property
  def padded_bytes(self) -> int:
    """Bytes in memory, padded to whole tiles, such as T(8,128) on a TPU."""
    order, _, rest = self.layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    if not tile:
      return self.num_bytes
    tiles = [int(size) for size in tile[1].split(",")]
    major_to_minor = [int(i) for i in order.split(",") if i][::-1]
    dims = [1] * len(tiles) + [self.dims[i] for i in major_to_minor]
    last = [
      -(-d // t) * t for d, t in zip(dims[-len(tiles) :], tiles, strict=True)
    ]
    return _num_bytes(self.dtype, (*dims[: -len(tiles)], *last))

  @property
  def in_main_memory(self) -> bool:
    """Whether it is in the chip's main memory, without an S(n) for another."""
    return not re.search(r"S\([1-9]", self.layout)


class Instruction(NamedTuple):
  """An instruction, one line of the text.

  Attributes:
    name: unique in its computation.
    shape: text of the result's shape.
    opcode: the operation.
    arguments: text between the parentheses.
    operands: names of the instructions whose results it uses.
    called: (role, name) of the called computations.
    attributes: text after the parentheses.
  """

  name: str
  shape: str
  opcode: str
  arguments: str
  operands: tuple[str, ...]
  called: tuple[tuple[str, str], ...]
  attributes: str

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The result's arrays, nested tuples flattened."""
    return tuple(arrays(self.shape))

  @property
  def op_name(self) -> str:
    """Name of the original JAX operation, or ""."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
    return match[1].replace("\\'", "'") if match else ""

  @property
  def element(self) -> int:
    """Index of a get-tuple-element."""
    match = re.search(r"\bindex=(\d+)", self.attributes)
    assert match, self.name
    return int(match[1])


class Computation(NamedTuple):
  """A computation: instructions by name, and the root instruction."""

  instructions: dict[str, Instruction]
  root: Instruction


class Module(NamedTuple):
  """A program.

  Attributes:
    computations: by name, called ones before their callers.
    entry: name of the entry computation.
    sources: lines of Python by stack frame, innermost first, as (file, line).
  """

  computations: dict[str, Computation]
  entry: str
  sources: dict[int, tuple[tuple[str, int], ...]]


def parse(text: str) -> Module:
  """Parses `compiled.as_text()`."""
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
      instruction = _instruction(match[2], match[3])
      instructions[instruction.name] = instruction
      root = instruction if match[1] else root
  assert entry, "no entry computation"
  return Module(computations, entry, _sources(text))


def arrays(shape: str) -> Iterator[Array]:
  """The arrays in the text of a shape."""
  for dtype, dims, layout in _ARRAY.findall(shape):
    sizes = re.findall(r"\d+", dims)  # <=8 counts as 8.
    yield Array(dtype, tuple(map(int, sizes)), layout)


def trip_count(module: Module, caller: str, loop: Instruction) -> int | None:
  """Number of iterations of a while loop; None if unknown.

  XLA annotates it for CPUs and GPUs. For TPUs, it is derived from the loops of
  `jax.lax.scan`: a counter from a constant, in steps of a constant, to below a
  constant.
  """
  match = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if match:
    return int(match[1])
  called = dict(loop.called)
  condition = module.computations[called["condition"]]
  test = condition.root
  if test.opcode != "compare" or "direction=LT" not in test.attributes:
    return None
  counter = _original(condition.instructions, test.operands[0])
  outer = module.computations[caller].instructions
  body = module.computations[called["body"]]
  initial = outer[loop.operands[0]]
  if (
    counter.opcode != "get-tuple-element"
    or initial.opcode != "tuple"
    or body.root.opcode != "tuple"
  ):
    return None
  added = _original(body.instructions, body.root.operands[counter.element])
  if added.opcode != "add":
    return None
  before = _original(body.instructions, added.operands[0])
  if before.opcode != "get-tuple-element" or before.element != counter.element:
    return None
  start = _constant(outer, initial.operands[counter.element])
  end = _constant(condition.instructions, test.operands[1])
  step = _constant(body.instructions, added.operands[1])
  if start is None or end is None or not step:
    return None
  return max(0, -(-(end - start) // step))


def _original(
  instructions: Mapping[str, Instruction], name: str
) -> Instruction:
  """The instruction itself, or the source that it copies."""
  instruction = instructions[name]
  while instruction.opcode == "copy":
    instruction = instructions[instruction.operands[0]]
  return instruction


def _constant(instructions: Mapping[str, Instruction], name: str) -> int | None:
  """Value of an integer constant; None for anything else."""
  instruction = _original(instructions, name)
  integer = re.fullmatch(r"-?\d+", instruction.arguments)
  if instruction.opcode != "constant" or not integer:
    return None
  return int(integer[0])


def _instruction(name: str, text: str) -> Instruction:
  end = _closing(text, 0) if text.startswith("(") else 0
  opcode = _OPCODE.search(text, end)
  assert opcode, f"no opcode in {name}"
  close = _closing(text, opcode.end() - 1)
  arguments, attributes = text[opcode.end() : close - 1], text[close:]
  called = tuple(
    (role, callee[1:])
    for role, callees in _CALLED.findall(attributes)
    for callee in callees.split(", ")
  )
  return Instruction(
    name=name,
    shape=text[: opcode.start()],
    opcode=opcode[1],
    arguments=arguments,
    operands=tuple(re.findall(r"%([\w.-]+)", arguments)),
    called=called,
    attributes=attributes,
  )


def _closing(text: str, start: int) -> int:
  """Position after the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.end()
  raise AssertionError(f"unbalanced: {text[:80]}")


def _num_bytes(dtype: str, dims: tuple[int, ...]) -> int:
  bits = {"pred": 8, "token": 0, "opaque": 0}.get(dtype)
  if bits is None:
    width = re.match(r"[a-z]+(\d+)", dtype)
    assert width, dtype
    bits = int(width[1])
  for size in dims:
    bits *= size
  return -(-bits // 8)


def _sources(text: str) -> dict[int, tuple[tuple[str, int], ...]]:
  """Stack frames from the four tables before the computations."""
  files = {row: line.strip('"') for row, line in _table(text, "FileNames")}
  places = {
    row: (files[fields["file_name_id"]], fields["line"])
    for row, line in _table(text, "FileLocations")
    if (fields := _fields(line))
  }
  frames = {row: _fields(line) for row, line in _table(text, "StackFrames")}
  # The first frame has no parent: its entry is the number for "none".
  none = frames[1]["parent_frame_id"] if frames else 0
  stacks: dict[int, tuple[tuple[str, int], ...]] = {0: ()}
  for row, fields in sorted(frames.items()):
    parent = stacks[fields["parent_frame_id"] - none]
    stacks[row] = (places[fields["file_location_id"]], *parent)
  return stacks


def _table(text: str, title: str) -> list[tuple[int, str]]:
  match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
  rows = match[1].splitlines() if match else []
  return [(int(row), rest) for row, _, rest in (r.partition(" ") for r in rows)]


def _fields(text: str) -> dict[str, int]:
  return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def executions(module: Module) -> tuple[Counter[str], tuple[str, ...]]:
  """Executions of every computation in one call; loops of unknown length.

  Computations of fusions and reductions count as often as their callers. All
  branches of a condition count as taken; the body of a loop of unknown length
  counts once; the condition of a loop of known length does not count.
  """
  times: Counter[str] = Counter({module.entry: 1})
  unknown = []
  for name in reversed(module.computations):  # Callers first.
    for instruction in module.computations[name].instructions.values():
      if not times[name] or instruction.opcode in (
        "async-update",
        "async-done",
      ):
        continue  # Counted at the start operation.
      trips, count = 1, None
      if instruction.opcode == "while":
        count = trip_count(module, name, instruction)
        trips = 1 if count is None else count
        if count is None:
          unknown.append(instruction.op_name or instruction.name)
      for role, callee in instruction.called:
        if role != "condition" or count is None:
          times[callee] += times[name] * trips
  return times, tuple(unknown)


def executed(module: Module, *, asynchronous: bool = True) -> list[str]:
  """Computations whose instructions run as separate kernels, the entry first.

  Other computations are applied by a fusion or a reduction. `asynchronous`:
  whether to include asynchronous ones.
  """
  callers = ["call", "conditional", "while"] + ["async-start"] * asynchronous
  names = [module.entry]
  for name in names:  # The list grows during iteration.
    for instruction in module.computations[name].instructions.values():
      if instruction.opcode in callers:
        names += [c for _, c in instruction.called if c not in names]
  return names
