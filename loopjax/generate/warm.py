"""Compiles the programs of an engine before there are requests."""

from collections.abc import Iterator
from typing import Any

from loopjax.generate.engine import Engine
from loopjax.generate.prefixes import BLOCK
from loopjax.generate.programs import slots
from loopjax.generate.requests import GenerationRequest


def compile_programs(engine: Engine) -> int:
  """Runs all programs once, so later requests compile nothing.

  Prompts of every chunk size, alone and in groups, with all loops and with
  fewer; and texts of every length and number, with and without fewer loops
  and exits; each with and without log-probabilities.

  Args:
    engine: an engine without requests.

  Returns:
    The number of requests that were run.
  """
  num, prefixes = 0, engine.prefixes
  engine.prefixes = None  # These prompts must be prefilled, not copied.
  for requests in _batches(engine):
    engine.generate(requests)
    num += len(requests)
  for size in engine.row_sizes:
    for options in _ways(engine, size):
      engine.write_nothing(size, **options)
  if prefixes is not None:
    engine.prefixes, max_tokens = prefixes, engine.limits.max_tokens
    assert max_tokens is not None  # Such a cache has places.
    for size in prefixes.sizes:
      for _ in range(
        2
      ):  # The first run stores the blocks, the second copies them.
        length = min(size * BLOCK + 1, max_tokens)
        engine.generate([_request(length, 0)])
        num += 1
    prefixes.clear()
  return num


def _batches(engine: Engine) -> Iterator[list[GenerationRequest]]:
  max_length = engine.limits.max_tokens or 2 * engine.chunk_sizes[-1]
  # A prompt has one chunk, or some of the largest size before its last.
  prompts = [
    read + size
    for read in (0, engine.chunk_sizes[-1])
    for size in engine.chunk_sizes
  ]
  for prefill_loops in (0, 1)[: 1 + engine.limits.has_prefill]:
    for top in (0, 1):
      for length in prompts:
        for group in engine.group_sizes:
          yield [_request(min(length, max_length), top, prefill_loops)] * group


def _ways(engine: Engine, size: int) -> Iterator[dict[str, Any]]:
  """The options of all programs that write tokens of so many sequences."""
  limits = engine.limits
  depths = [limits.depth(size)]
  depths += [slots.LOOPS] * (limits.min_loops < limits.num_loops)
  depths += [slots.EXITS] * limits.has_exits
  for num_top in (0, limits.num_top):
    for span in limits.spans:
      for depth in dict.fromkeys(depths):
        yield {"num_top": num_top, "span": span, "depth": depth}


def _request(
  length: int, top: int, prefill_loops: int = 0
) -> GenerationRequest:
  return GenerationRequest(
    (0,) * length, 1, top_log_probabilities=top, prefill_loops=prefill_loops
  )
