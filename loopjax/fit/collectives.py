"""How often a program communicates per call, and how many bytes it moves."""

import re
from collections import Counter
from typing import NamedTuple

from loopjax.fit import hlo

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
    num_bytes: by kind, of the results on one chip, without padding.
    unknown: names of loops whose length the text does not state; their contents
      count once.
  """

  executions: dict[str, int]
  num_bytes: dict[str, int]
  unknown: tuple[str, ...]


def collectives(module: hlo.Module) -> Traffic:
  """Counts collectives, multiplied by the iterations of enclosing loops.

  An asynchronous one counts at its "done", since the result of its "start"
  contains the operands too. Libtpu spreads one over a chain of fusions, and
  writes a reduce-scatter as a fusion that begins with an all-reduce.
  """
  times, unknown = _times(module)
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
  executions: Counter[str] = Counter()
  num_bytes: Counter[str] = Counter()
  for number, kind, size in found.values():
    executions[kind] += number
    num_bytes[kind] += number * size
  return Traffic(dict(executions), dict(num_bytes), unknown)


def _times(module: hlo.Module) -> tuple[Counter[str], tuple[str, ...]]:
  """Executions of every computation per call; loops of unknown length."""
  times: Counter[str] = Counter({module.entry: 1})
  unknown = []
  for name in reversed(module.computations):  # Callers first.
    for instruction in module.computations[name].instructions.values():
      if not times[name] or instruction.opcode in (
        "async-update",
        "async-done",
      ):
        continue  # Asynchronous computations count at their start.
      trips = 1
      if instruction.opcode == "while":
        known = hlo.trip_count(module, name, instruction)
        trips = 1 if known is None else known
        if known is None:
          unknown.append(instruction.op_name or instruction.name)
      for _, callee in instruction.called:
        times[callee] += times[name] * trips
  return times, tuple(unknown)
