"""Grain graphs whose order depends only on the seed.

The order of the examples and the randomness of each do not depend on the number
of processes or on interruptions. Position i of the stream is always the same
example with the same noise. The iterator's state is one integer, the number of
batches consumed. Memory does not grow with the number of examples.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.types import Dataset

if TYPE_CHECKING:
  import grain  # Lazy: it imports Orbax, and describing a task needs neither.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Rows = np.ndarray
Shapes = dict[str, jax.ShapeDtypeStruct]  # Of a batch, by entry.
_ROUNDS = 4  # Rounds of the shuffling cipher, as in Grain's own shuffle.
_MAX_TABLE = 2**18  # Examples of a permutation that is kept, 1 MB.


def abstract_rows(
  batch_size: int,
  length: int,
  *,
  integers: tuple[str, ...] = (),
  floats: tuple[str, ...] = (),
) -> Shapes:
  """Shapes and dtypes of a batch of rows, all [batch_size, length].

  Args:
    batch_size: rows.
    length: tokens of a row.
    integers, floats: entries besides "inputs", "targets", "weights".
  """
  dtypes = {
    **dict.fromkeys(("inputs", "targets", *integers), jnp.int32),
    **dict.fromkeys(("weights", *floats), jnp.float32),
  }
  shape = (batch_size, length)
  return {name: jax.ShapeDtypeStruct(shape, x) for name, x in dtypes.items()}


def stream(
  make_batch: Callable[[Rows], Mapping[str, np.ndarray]],
  batch_size: int,
  rows: Rows | None = None,
) -> "grain.MapDataset":
  """Endless batches of generated examples.

  Args:
    make_batch: positions [b] in the stream -> batch of those examples; all
      its randomness must come from the positions.
    batch_size: global batch size, over all processes.
    rows: the rows of every global batch that this process reads, ascending; all
      if None.

  Returns:
    Graph whose element i is this process's part of global batch i.
  """

  import grain

  def make(index: int, _: int) -> Mapping[str, np.ndarray]:
    return make_batch(_positions(index, batch_size, rows))

  return grain.MapDataset.range(1).repeat(None).map_with_index(make)


def training_batches(
  make_batch: Callable[[Rows, Rows], Mapping[str, np.ndarray]],
  num_examples: int,
  batch_size: int,
  seed: int,
  rows: Rows | None = None,
) -> "grain.MapDataset":
  """Endless batches from a fixed set of examples, reshuffled every epoch.

  Args:
    make_batch: (indices of examples [b], positions [b] in the stream) ->
      their batch; all its randomness must come from the positions.
    num_examples: in the data set.
    seed: seed of the order.
    batch_size, rows: as in `stream`.
  """

  def make(positions: Rows) -> Mapping[str, np.ndarray]:
    epochs, places = np.divmod(positions, num_examples)
    examples = [
      shuffled(places[epochs == epoch], num_examples, seed, epoch)
      for epoch in np.unique(epochs).tolist()
    ]
    return make_batch(np.concatenate(examples), positions)

  return stream(make, batch_size, rows)


def evaluation_batches(
  make_batch: Callable[[Rows, Rows], Mapping[str, np.ndarray]],
  num_examples: int,
  batch_size: int,
  rows: Rows | None = None,
) -> "grain.MapDataset":
  """Every example once, in order; the last batch is padded with row 0.

  "valid" [b] bool marks the examples that count; the rest is as in training.
  """

  import grain

  def make(index: int) -> Mapping[str, np.ndarray]:
    positions = _positions(index, batch_size, rows)
    valid = positions < num_examples
    batch = make_batch(np.where(valid, positions, 0), positions)
    return {**batch, "valid": valid}

  return grain.MapDataset.range(-(-num_examples // batch_size)).map(make)


def generated(
  make: Callable[[Rows], Mapping[str, np.ndarray]],
  split: str,
  num_examples: int,
  batch_size: int,
  rows: Rows | None,
  *,
  groups: Mapping[str, tuple[str, ...]] = {},
  facts: Mapping[str, int | float | str] = {},
) -> Dataset:
  """A split of generated examples: endless in training, else `num_examples`.

  Args:
    make: as in `stream`.
    split, batch_size, rows: as in `protocols.Task.make_dataset`.
    num_examples: number of examples in evaluation.
    groups: as in `Dataset`, in evaluation.
    facts: as in `Dataset`, besides the number of examples.
  """
  if split == "train":
    return Dataset(stream(make, batch_size, rows), facts=facts)
  batches = evaluation_batches(
    lambda examples, _: make(examples), num_examples, batch_size, rows
  )
  return Dataset(batches, groups, {**facts, f"{split}_examples": num_examples})


def shuffled(places: Rows, num_examples: int, *seed: int) -> Rows:
  """The examples at given places of a random permutation.

  The permutation is the one of Grain's index shuffle, which looks up one place
  without the others. Of up to 2^18 examples, all places are computed at once,
  in a tenth of the time or less, and kept until the next epochs.

  Args:
    places: int [b], at least 0 and below `num_examples`.
    num_examples: size of the permutation, at most 2^32.
    *seed: integers that determine the order.

  Returns:
    int64 [b].
  """
  key = stream_seed(*seed) % 2**32
  if num_examples <= _MAX_TABLE:
    order = _permutation(int(num_examples), key)
    return order[places].astype(np.int64)
  import grain

  shuffle, last = grain.experimental.index_shuffle, num_examples - 1
  examples = [shuffle(place, last, key, _ROUNDS) for place in places.tolist()]
  return np.array(examples, np.int64)


@functools.lru_cache(maxsize=32)  # Sources of a text, and their next epochs.
def _permutation(num: int, key: int) -> Rows:
  """Grain's index shuffle of all of [0, num), int32 [num].

  It encrypts a number, and its result again until that is below `num`
  (cycle-walking; Black and Rogaway 2002), by rounds of Simon (Beaulieu et al.
  2013) with half blocks of at least eight bits and keys from C++'s seed_seq.
  For 2^16 + 1 examples alone, where Grain repeats one, the order is another.
  """
  bits = max(8, ((num - 1).bit_length() + 1) // 2)
  mask = np.uint32(2**bits - 1)
  left, right = np.divmod(np.arange(4**bits, dtype=np.uint32), 2**bits)

  def turned(x: Rows, by: int) -> Rows:
    return (x << np.uint32(by) | x >> np.uint32(bits - by)) & mask

  for key_of_round in _seed_sequence(key, _ROUNDS):
    changed = turned(right, 1) & turned(right, 8) ^ turned(right, 2)
    left, right = right, left ^ changed ^ np.uint32(key_of_round) & mask
  following = (left << np.uint32(bits) | right).astype(np.int32)
  # Every round doubles the steps of a walk that has not ended.
  while np.any(following[:num] >= num):
    following = np.where(following < num, following, following[following])
  return following[:num]


def _seed_sequence(seed: int, num: int) -> list[int]:
  """The first numbers of C++'s `std::seed_seq{seed}`, for `num` below 7."""
  words, shift = [0x8B8B8B8B] * num, (num - 1) // 2
  first = (num - shift) // 2

  def scrambled(x: int, factor: int) -> int:
    return factor * (x ^ x >> 27) % 2**32

  for i in range(num):
    near = words[i] ^ words[(i + first) % num] ^ words[i - 1]
    x = scrambled(near, 1664525)
    words[(i + first) % num] = (words[(i + first) % num] + x) % 2**32
    x += (1, 1 + seed)[i] if i < 2 else i
    place = (i + first + shift) % num
    words[place] = (words[place] + x) % 2**32
    words[i] = x % 2**32
  for i in range(num):
    near = (words[i] + words[(i + first) % num] + words[i - 1]) % 2**32
    x = scrambled(near, 1566083941)
    words[(i + first) % num] ^= x
    words[(i + first + shift) % num] ^= (x - i) % 2**32
    words[i] = (x - i) % 2**32
  return words


def _positions(index: int, batch_size: int, rows: Rows | None) -> np.ndarray:
  """Positions in the stream of some rows of global batch `index`, ascending."""
  return index * batch_size + (np.arange(batch_size) if rows is None else rows)


def iterate(
  batches: "grain.MapDataset",
  start: int = 0,
  num_threads: int = 2,
  group: int = 0,
) -> Iterator[Mapping[str, np.ndarray]]:
  """Iterates from batch `start`, prefetching a few batches in threads.

  With `group`, elements are so many batches, stacked along a new first axis;
  the threads keep two of them ready.
  """
  import grain

  ahead = 2 if group else 8
  options = grain.ReadOptions(
    num_threads=num_threads, prefetch_buffer_size=ahead if num_threads else 0
  )
  left = batches[start:]
  grouped = left.batch(group, drop_remainder=True) if group else left
  return iter(grouped.to_iter_dataset(options))


def uniforms(seed: int, positions: np.ndarray, num: int) -> np.ndarray:
  """Random numbers in [0, 1), determined by positions of the stream.

  A counter-based generator: the same (seed, position, column) gives the same
  number on any process.

  Args:
    seed: seed of the stream.
    positions: int [N].
    num: numbers per position.

  Returns:
    float64 [N, num].
  """
  column = np.arange(num, dtype=np.uint64)
  counters = positions.astype(np.uint64)[:, None] * np.uint64(num) + column
  stream = splitmix64(np.array([seed], np.uint64))
  bits = splitmix64(counters + stream)
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stream_seed(*parts: int) -> int:
  """A seed for `uniforms`, distinct for distinct sequences of equal length.

  Trailing zeros are ignored: `(5,)` and `(5, 0)` have the same seed.
  """
  sequence = np.random.SeedSequence(parts)
  return int(sequence.generate_state(1, np.uint64)[0])


def in_a_row(
  tokens: np.ndarray,
  present: np.ndarray,
  length: int,
  padding: int | bool,
  *,
  front: bool = False,
) -> np.ndarray:
  """The `present` tokens of each example, concatenated and padded.

  Args:
    tokens: [B, ...].
    present: bool, the same shape.
    length: length of each row of the result.
    padding: id of the padding token.
    front: whether to pad on the left instead of the right.

  Returns:
    [B, length], of the tokens' dtype.
  """
  counts = present.sum(axis=tuple(range(1, present.ndim)))[:, None]
  places = np.arange(length)
  row = np.full((len(tokens), length), padding, tokens.dtype)
  row[places >= length - counts if front else places < counts] = tokens[present]
  return row


def with_answers(
  inputs: np.ndarray, answers: np.ndarray, counted: np.ndarray | bool = True
) -> dict[str, np.ndarray]:
  """A batch in which the last n tokens of a row predict answers.

  Args:
    inputs: token ids [B, T].
    answers: the next tokens at the last n positions, int [B, n].
    counted: which of these count, bool [B, n].

  Returns:
    "inputs" and "targets" i32, "weights" f32, [B, T]. Targets that do not count
    are 0, not padding, whose logit may be -inf.
  """
  num = answers.shape[1]
  targets = np.zeros(inputs.shape, np.int32)
  targets[:, -num:] = np.where(counted, answers, 0)
  weights = np.zeros(inputs.shape, np.float32)
  weights[:, -num:] = counted
  return {
    "inputs": inputs.astype(np.int32),
    "targets": targets,
    "weights": weights,
  }


def doublings(largest: int) -> tuple[int, ...]:
  """1, 2, 4, ..., and `largest`: the sizes that an evaluation scores apart."""
  powers = range(largest.bit_length())
  return tuple(sorted({*(2**power for power in powers), largest}))


def check_equal_numbers(num: int, sizes: Sequence[int], what: str) -> None:
  """Raises UserError unless as many examples can be of each size."""
  if num % len(sizes):
    raise UserError(
      f"task.num_eval_examples={num} must be a multiple of {len(sizes)}: equal"
      f" numbers for {', '.join(map(str, sizes))} {what}"
    )


def range_names(edges: Sequence[int]) -> tuple[str, ...]:
  """Names of the groups between edges: "0", "1-2", ..., "100+"."""
  names = [
    str(low) if high == low + 1 else f"{low}-{high - 1}"
    for low, high in itertools.pairwise(edges)
  ]
  return (*names, f"{edges[-1]}+")


def splitmix64(values: np.ndarray) -> np.ndarray:
  """Scrambles uint64 values bijectively (Steele et al. 2014)."""
  with np.errstate(over="ignore"):  # Arithmetic is modulo 2^64.
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
