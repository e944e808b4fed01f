"""Applies a function to chunks of text in several processes."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from loopjax.data.text import files
from loopjax.errors import UserError

Result = TypeVar("Result")
_AHEAD = 2  # Chunks queued for the processes.
# Below this size, processes take longer to start than they save.
_MIN_BYTES = 64 << 20


def in_order(
  function: Callable[[files.Chunk], Result],
  chunks: Iterable[files.Chunk],
  num_bytes: int,
) -> Iterator[Result]:
  """The result for each chunk, in the order of the chunks.

  Only a few chunks and results are in memory at a time.

  Args:
    function: a picklable function; UserErrors that it raises are raised here.
    chunks: the chunks, which this process reads.
    num_bytes: size of the files that the chunks come from. Small files are
      processed in this process.

  Raises:
    UserError: a process was killed.
  """
  num_processes = _num_cpus()
  if num_bytes < _MIN_BYTES or num_processes == 1:
    yield from map(function, chunks)
    return
  # JAX has threads in this process. Workers are therefore forked from a server
  # process that has only imported this module, and share its memory.
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__])
  with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:
    chunks = iter(chunks)
    waiting = collections.deque(
      pool.submit(function, chunk)
      for chunk in itertools.islice(chunks, num_processes + _AHEAD)
    )
    try:
      while waiting:
        yield waiting.popleft().result()
        for chunk in itertools.islice(chunks, 1):
          waiting.append(pool.submit(function, chunk))
    except BrokenProcessPool:
      raise UserError(
        "a text preparation process was killed, possibly for lack of memory"
      ) from None
    finally:
      for future in waiting:
        future.cancel()


def _num_cpus() -> int:
  """CPUs available to this process, if the system reports them (not macOS)."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
