"""Grain graphs whose order depends on the seed alone.

The order of the examples and the randomness of each do not depend on how many
processes read, nor on where a run was interrupted: position i of the stream is
the same example with the same noise for ever, so that one integer, the number
of batches consumed, is the whole state of the iterator.
"""

from collections.abc import Callable, Iterator, Mapping

import grain
import jax
import numpy as np

from loopjax.data import hashing

Rows = np.ndarray


def training_batches(
  make_batch: Callable[[Rows, Rows], Mapping[str, np.ndarray]],
  num_examples: int,
  batch_size: int,
  seed: int,
) -> grain.MapDataset:
  """Endless batches, reshuffled every epoch.

  Args:
    make_batch: (rows [b] of the data, positions [b] in the stream) -> batch of
      this process; all its randomness must come from the positions.
    num_examples: rows of the data.
    batch_size: over all processes.
    seed: of the order.

  Returns:
    Graph whose element i is this process's part of global batch i.
  """
  rows = grain.MapDataset.range(num_examples).seed(seed).shuffle().repeat(None)
  return _per_process(rows, batch_size, make_batch)


def evaluation_batches(
  make_batch: Callable[[Rows, Rows], Mapping[str, np.ndarray]],
  num_examples: int,
  batch_size: int,
) -> grain.MapDataset:
  """Every row once and in order; the last batch is filled up with row 0.

  "valid" [b] bool marks the rows that count.
  """
  num_batches = -(-num_examples // batch_size)

  def make(rows, positions):
    valid = rows < num_examples
    return {**make_batch(np.where(valid, rows, 0), positions), "valid": valid}

  rows = grain.MapDataset.range(num_batches * batch_size)
  return _per_process(rows, batch_size, make)


def _per_process(
  rows: grain.MapDataset,
  batch_size: int,
  make_batch: Callable[[Rows, Rows], Mapping[str, np.ndarray]],
) -> grain.MapDataset:
  """This process's contiguous block of every global batch."""
  processes, process = jax.process_count(), jax.process_index()
  size = batch_size // processes
  blocks = rows.batch(size, drop_remainder=True)[process::processes]
  return blocks.map_with_index(
    lambda index, rows: make_batch(
      rows, index * batch_size + process * size + np.arange(size)
    )
  )


def iterate(
  batches: grain.MapDataset, start: int = 0, num_threads: int = 2
) -> Iterator[Mapping[str, np.ndarray]]:
  """Iterates from batch `start` on, a few batches ahead in threads."""
  options = grain.ReadOptions(
    num_threads=num_threads, prefetch_buffer_size=8 if num_threads else 0
  )
  return iter(batches[start:].to_iter_dataset(options))


def uniforms(seed: int, positions: np.ndarray, num: int) -> np.ndarray:
  """Random numbers in [0, 1) that belong to positions of the stream.

  A counter-based generator: the same (seed, position, column) gives the same
  number on any process.

  Args:
    seed: of the stream.
    positions: int [N].
    num: numbers per position.

  Returns:
    float64 [N, num].
  """
  column = np.arange(num, dtype=np.uint64)
  counters = positions.astype(np.uint64)[:, None] * np.uint64(num) + column
  stream = hashing.splitmix64(np.array([seed], np.uint64))
  bits = hashing.splitmix64(counters + stream)
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
