"""Compiles the programs of an engine before there are requests."""

from collections.abc import Iterator

from loopjax.generate import slots
from loopjax.generate.engine import Engine
from loopjax.generate.prefixes import BLOCK
from loopjax.generate.requests import GenerationRequest


def compile_programs(engine: Engine) -> int:
  """Runs all programs, so that later requests compile nothing.

  Prompts of every chunk size, alone and as many as are read at once, and texts
  of every length and number, each with and without log-probabilities and exits;
  not with drafts or fewer loops.

  Args:
    engine: an engine without requests.

  Returns:
    The number of requests that were run.
  """
  num, prefixes = 0, engine.prefixes
  engine.prefixes = None  # These requests are to be read.
  for requests in _batches(engine):
    engine.generate(requests)
    num += len(requests)
  for num_top in (0, slots.MAX_TOP):
    for depth in (None, slots.EXITS)[: 1 + engine.limits.has_exits]:
      engine.write_nothing(num_top, depth)
  if prefixes is not None:
    engine.prefixes, most = prefixes, engine.limits.max_tokens
    assert most is not None  # Such a cache has places.
    for size in prefixes.sizes:
      for _ in range(2):  # The first time it is kept, the second time copied.
        length = min(size * BLOCK + 1, most)
        engine.generate([_request(length, 0)])
        num += 1
    prefixes.clear()
  return num


def _batches(engine: Engine) -> Iterator[list[GenerationRequest]]:
  most = engine.limits.max_prompt_tokens or 2 * engine.chunk_sizes[-1]
  # A prompt has one chunk, or some of the largest size before its last.
  prompts = [
    more + size
    for more in (0, engine.chunk_sizes[-1])
    for size in engine.chunk_sizes
  ]
  for top in (0, 1):
    for length in prompts:
      for group in engine.group_sizes:
        yield [_request(min(length, most), top)] * group


def _request(length: int, top: int) -> GenerationRequest:
  return GenerationRequest((0,) * length, 1, top_log_probabilities=top)
