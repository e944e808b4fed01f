"""Sizes that programs are compiled for: few, and not much too large."""

import functools
from typing import Any

import jax

from loopjax.generate import program
from loopjax.protocols import ReadsByChunk
from loopjax.types import TaskSpec

SMALLEST_SPAN = 64
_SMALLEST_PART = 16


def powers(least: int, most: int) -> list[int]:
  """least, 4 least, 16 least ... below `most`, and `most`."""
  sizes = [least]
  while sizes[-1] * 4 < most:
    sizes.append(sizes[-1] * 4)
  return [size for size in sizes if size < most] + [most]


def parts(
  config: Any, spec: TaskSpec, prompt_part: int, max_tokens: int
) -> list[int]:
  """Sizes of the parts of a prompt; all but its last part have the largest.

  Args:
    config: of the model.
    spec: of its task.
    prompt_part: the most tokens, rounded up to whole chunks of a model that
      reads by chunk.
    max_tokens: of a text.
  """
  if isinstance(config, ReadsByChunk):
    prompt_part += -prompt_part % config.read_chunk(spec)
  return powers(_SMALLEST_PART, min(prompt_part, max_tokens))


def span(num_tokens: int, most: int) -> int:
  """Places for so many tokens: 64, 96, 128, 192, 256 ..., or `most`."""
  size = SMALLEST_SPAN
  while size < num_tokens:
    size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
  return min(size, most)


def grows(reader: program.Reader, params: Any) -> bool:
  """Whether a cache depends on the number of tokens that it has room for."""
  least = reader.prompt_tokens + 1

  def shapes(max_tokens: int) -> list[tuple[int, ...]]:
    make = functools.partial(reader.empty_cache, batch=1, max_tokens=max_tokens)
    return [x.shape for x in jax.tree.leaves(jax.eval_shape(make, params))]

  return shapes(least) != shapes(least + 1)
