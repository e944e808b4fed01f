"""Records shared across the package. Plain data, no behaviour."""

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
  """The dtype of each kind of number.

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
  # Half the memory, for models that are read and not trained.
  "bfloat16_params": Precision(params=jnp.bfloat16, compute=jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """What is needed of a task to build a model.

  Attributes:
    vocab_size: number of token ids, including padding.
    sequence_length: tokens of one example.
    coordinates: integer coordinates of every position (row, column, box on a
      board; the index alone in text), as nested tuples so that the record is
      hashable.
    num_padding_tokens: ids at the end of the vocabulary that are not real
      tokens; models that read a distribution over tokens leave them out.
    num_answer_tokens: tokens at the end of every sequence that are predicted in
      one pass, after everything before them was read; 0 if every token is
      predicted.
    coordinate_names: a name for each coordinate.
    packs_documents: rows hold several documents, which see nothing of each
      other; batches have "documents", i32 [B, T]: 1, 2, ... and 0 for padding.
  """

  vocab_size: int
  sequence_length: int
  coordinates: tuple[tuple[int, ...], ...]
  num_padding_tokens: int = 0
  num_answer_tokens: int = 0
  coordinate_names: tuple[str, ...] = ("position",)
  packs_documents: bool = False


@dataclasses.dataclass(frozen=True)
class LoopOptions:
  """How a model's loop is executed; see `loopjax.loop.driver.run_loop`."""

  kind: str = "scan"
  remat: str = "none"


class Carried(NamedTuple):
  """What a family carries from one optimizer step to the next.

  Attributes:
    by_example: pytree of arrays [B, ...] over the global batch; row b is passed
      to row b of the next batch.
    shared: pytree of floating-point arrays that belong to no example. Where a
      batch is computed in parts, every part starts from the same arrays, and
      the mean of their results is passed on.
  """

  by_example: Any = ()
  shared: Any = ()


class TokenScores(NamedTuple):
  """What scores read of predictions.

  Attributes:
    losses: cross-entropy of the targets in nats, f32 [B, S].
    predicted: the most likely tokens, the first of equals, i32 [B, S].
  """

  losses: Array
  predicted: Array


class Output(NamedTuple):
  """The output of every model.

  Attributes:
    logits: f32 [B, T, V], or of the last tokens only if nothing before them
      is predicted.
    losses: unweighted auxiliary losses, f32 scalars by name.
    stats: per-example statistics, f32 [B] by name (steps taken, ...).
    loops: per-loop statistics, f32 [R] by name, averaged over the batch.
    trace: the per-loop records that were requested, arrays [R, B, ...] by
      name; empty unless requested.
    cache: what later tokens need of these, if they were read with a cache.
    hidden: the input of the read-out, f32 [B, T, D], of the tokens that logits
      are of, for losses and scores computed without logits; None if the family
      has no such loss.
    tokens: `TokenScores` of the tokens that logits are of, where an evaluation
      computes them from `hidden`; see `losses.tokens.scores`.
  """

  logits: Any
  losses: dict[str, Any]
  stats: dict[str, Any]
  loops: dict[str, Any]
  trace: dict[str, Any]
  hidden: Any = None
  cache: Any = None
  tokens: TokenScores | None = None


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A stream of batches, with its groups and facts.

  Attributes:
    batches: Grain graph; element i is this process's part of global batch i, a
      dict of arrays [local batch, ...]. Training graphs are endless.
    groups: names of the groups that scores are also reported for, by grouping;
      the batch holds their ids as "group/<grouping>".
    facts: what the summary records about the data: counts, hashes.
  """

  batches: grain.MapDataset
  groups: Mapping[str, tuple[str, ...]]
  facts: Mapping[str, int | float | str]
