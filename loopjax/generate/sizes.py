"""The shapes that programs are compiled for: few, and not much too large."""

from typing import Any

from loopjax.protocols import ReadsByChunk
from loopjax.types import TaskSpec

SMALLEST_SPAN = 64
_SMALLEST_CHUNK = 16


def powers(least: int, most: int) -> list[int]:
  """least, 4 least, 16 least ... below `most`, and `most`."""
  sizes = [least]
  while sizes[-1] * 4 < most:
    sizes.append(sizes[-1] * 4)
  return [size for size in sizes if size < most] + [most]


def prompt_chunks(
  config: Any, spec: TaskSpec, prompt_chunk: int, max_tokens: int
) -> list[int]:
  """Sizes of a prompt's chunks; all chunks but its last have the largest.

  Args:
    config: the model's.
    spec: the task's.
    prompt_chunk: maximum size, rounded up to whole chunks of a model that reads
      by chunk.
    max_tokens: maximum length of a sequence.
  """
  if isinstance(config, ReadsByChunk):
    prompt_chunk += -prompt_chunk % config.read_chunk(spec)
  return powers(_SMALLEST_CHUNK, min(prompt_chunk, max_tokens))


def span(num_tokens: int, most: int) -> int:
  """The next of 64, 96, 128, 192, 256 ... for so many tokens, or `most`."""
  size = SMALLEST_SPAN
  while size < num_tokens:
    size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
  return min(size, most)
