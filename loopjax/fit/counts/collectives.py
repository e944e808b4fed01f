"""How often a program communicates per call, and how many bytes it moves."""

import re
from collections import Counter
from typing import NamedTuple

from loopjax.fit.counts import executions, hlo

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
  times, unknown = executions.counts(module)
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
