"""The shapes that programs are compiled for: few, with little padding."""

import sys
from collections.abc import Sequence
from typing import Any

from loopjax.protocols import Reading
from loopjax.types import TaskSpec

SMALLEST_SPAN = 64
_SMALLEST_CHUNK = 16
# Weights that stay in a CPU's caches are as fast for eight rows as for more,
# and the places that so few attend to stay there, too:
# benchmarks/results/2026-11-24_cpu_2cores_slots.md.
_SMALL_WEIGHTS, _FEW_ROWS = 16 * 2**20, 8


def powers(smallest: int, largest: int, factor: int = 4) -> list[int]:
  """`smallest` times powers of `factor`, below `largest`; then `largest`."""
  sizes = [smallest]
  while sizes[-1] * factor < largest:
    sizes.append(sizes[-1] * factor)
  return [size for size in sizes if size < largest] + [largest]


def fitting(sizes: Sequence[int], num: int) -> int:
  """The first size that is enough for `num`, or the last."""
  return next((size for size in sizes if size >= num), sizes[-1])


def prompt_chunks(
  reading: Reading,
  config: Any,
  spec: TaskSpec,
  prompt_chunk: int,
  max_tokens: int,
) -> list[int]:
  """Sizes of a prompt's chunks; all chunks but its last have the largest.

  Args:
    reading: the family's `Reading`.
    config: the model's config.
    spec: the task's spec.
    prompt_chunk: maximum size, rounded up to whole chunks of a model that reads
      by chunk.
    max_tokens: maximum length of a sequence.
  """
  if reading.chunk:
    prompt_chunk += -prompt_chunk % reading.chunk(config, spec)
  return powers(_SMALLEST_CHUNK, min(prompt_chunk, max_tokens))


def rows_at_once(num_bytes: int) -> int:
  """Sequences decoded in one call on a CPU, by the bytes of the weights."""
  return _FEW_ROWS if num_bytes <= _SMALL_WEIGHTS else sys.maxsize


def span(num_tokens: int, max_tokens: int) -> int:
  """The least of 64, 96, 128, 192, ..., `max_tokens` for a number of tokens."""
  size = SMALLEST_SPAN
  while size < num_tokens:
    size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
  return min(size, max_tokens)
