"""Records that several parts share. Plain data, no behaviour."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp

Array = jax.Array
Batch = Mapping[str, Any]
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Precision:
  """Which dtype each kind of number has.

  Attributes:
    params: parameters, EMA and optimizer state.
    compute: inputs of the matrix products.
    accumulate: residual stream, norm statistics, halting sums, losses.
  """

  params: Any = jnp.float32
  compute: Any = jnp.float32
  accumulate: Any = jnp.float32


PRECISIONS = {
  "float32": Precision(),
  "bfloat16": Precision(compute=jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """What a model must know of a task to be built.

  Attributes:
    vocab_size: number of token ids, padding included.
    sequence_length: tokens of one example.
    coordinates: for every position its integer coordinates (row, column, box
      on a board; the index alone in text), as nested tuples so that the record
      stays hashable.
    num_padding_tokens: ids at the end of the vocabulary that are no real
      tokens; models that read a distribution over tokens leave them out.
    num_answer_tokens: tokens at the end of every sequence that are predicted in
      one pass, after all before them was read; 0 where no such line is drawn.
    coordinate_names: what people call each coordinate.
  """

  vocab_size: int
  sequence_length: int
  coordinates: tuple[tuple[int, ...], ...]
  num_padding_tokens: int = 0
  num_answer_tokens: int = 0
  coordinate_names: tuple[str, ...] = ("position",)


@dataclasses.dataclass(frozen=True)
class LoopOptions:
  """How a model's loop is executed; see `loopjax.loop.driver.run_loop`."""

  kind: str = "scan"
  remat: str = "none"


class Carried(NamedTuple):
  """What a family carries from one optimizer step to the next.

  Attributes:
    by_example: pytree of arrays [B, ...] over the global batch; row b meets row
      b of the next batch.
    shared: pytree of floating-point arrays that belong to no example. Where a
      batch is computed in parts, every part starts from the same ones and the
      mean of what they make of them goes on.
  """

  by_example: Any = ()
  shared: Any = ()


class Output(NamedTuple):
  """What every model returns.

  Attributes:
    logits: f32 [B, T, V], or of the last tokens alone if nothing before them
      is predicted.
    losses: auxiliary losses, f32 scalars by name, before their weights.
    stats: per-example statistics, f32 [B] by name (steps taken, ...).
    loops: per-loop statistics, f32 [R] by name, averaged over the batch.
    trace: what the caller asked to see of every loop, arrays [R, B, ...] by
      name; empty unless asked.
    hidden: what the read-out reads, f32 [B, T, D], of the tokens that logits
      are of, for losses that are computed without them; None if the family has
      no such loss.
  """

  logits: Any
  losses: dict[str, Any]
  stats: dict[str, Any]
  loops: dict[str, Any]
  trace: dict[str, Any]
  hidden: Any = None


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A stream of batches, and what is to be known of it.

  Attributes:
    batches: Grain graph; element i is this process's part of global batch i, a
      dict of arrays [local batch, ...]. Training graphs have no end.
    groups: names of the groups that scores are also reported for: for each
      grouping the group names; the batch holds the ids as "group/<grouping>".
    facts: what is to be known of the data in the summary: counts, hashes.
  """

  batches: grain.MapDataset
  groups: Mapping[str, tuple[str, ...]]
  facts: Mapping[str, int | float | str]
