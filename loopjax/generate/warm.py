"""Compiles the programs of an engine before there are requests."""

from collections.abc import Iterator

from loopjax.generate import sizes
from loopjax.generate.engine import Engine
from loopjax.generate.prefixes import BLOCK
from loopjax.generate.requests import GenerationRequest

_EXIT = 0.5  # Any threshold below 1 has the same program.


def compile_programs(engine: Engine) -> int:
  """Runs requests of all sizes, so that later ones compile nothing.

  Prompts of every chunk size, alone and as many as are read at once, and texts
  of every length, each with and without log-probabilities and exits.

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
  if prefixes is not None:
    engine.prefixes, most = prefixes, engine.limits.max_tokens
    assert most is not None  # Such a cache has places.
    for size in prefixes.sizes:
      for _ in range(2):  # The first time it is kept, the second time copied.
        length = min(size * BLOCK + 1, most)
        engine.generate([_request(length, 0, 1.0)])
        num += 1
    prefixes.clear()
  return num


def _batches(engine: Engine) -> Iterator[list[GenerationRequest]]:
  most = engine.limits.max_prompt_tokens or 2 * engine.chunk_sizes[-1]
  thresholds = (1.0,) if engine.limits.exit_rule == "fixed" else (1.0, _EXIT)
  # A prompt has one chunk, or some of the largest size before its last.
  prompts = [
    more + size
    for more in (0, engine.chunk_sizes[-1])
    for size in engine.chunk_sizes
  ]
  for top in (0, 1):
    for length in prompts:
      for group in engine.group_sizes:
        yield [_request(min(length, most), top, 1.0)] * group
    for length in _lengths(engine):
      for threshold in thresholds:
        yield [_request(min(length, most), top, threshold)]


def _lengths(engine: Engine) -> Iterator[int]:
  """Prompts after which attention reads each number of cache entries."""
  if engine.limits.max_tokens is None:
    return
  span = 0
  while span < engine.limits.max_tokens:
    span = sizes.span(span + 1, engine.limits.max_tokens)
    yield max(1, span - engine.tokens_per_dispatch)


def _request(length: int, top: int, threshold: float) -> GenerationRequest:
  return GenerationRequest(
    (0,) * length,
    2,
    top_log_probabilities=top,
    exit_threshold=threshold,
  )
