"""Plain records used throughout the package."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.errors import UserError

if TYPE_CHECKING:
  import grain  # Brings Orbax; a model needs neither.

Array = jax.Array
Batch = Mapping[str, Any]
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Precision:
  """The dtypes of a model.

  Matrix products of float32 inputs have JAX's default precision, which rounds
  the inputs on accelerators (to TF32 or bfloat16), unless
  JAX_DEFAULT_MATMUL_PRECISION=highest is set. Decays, routers, halting heads
  and gates are always computed at the highest, except gates that are as large
  as the other products: those of memory banks and, in bfloat16, MELT's.

  Attributes:
    params: parameters, their moving averages, and optimizer state.
    compute: inputs of matrix products.
    accumulate: residual stream, norms, halting probabilities, losses.
  """

  params: Any = jnp.float32
  compute: Any = jnp.float32
  accumulate: Any = jnp.float32


PRECISIONS = {
  "float32": Precision(),
  "bfloat16": Precision(compute=jnp.bfloat16),
  # Halves the memory of parameters; for inference only.
  "bfloat16_params": Precision(params=jnp.bfloat16, compute=jnp.bfloat16),
}


MAX_LENGTH = 2**20  # Tokens of a row.


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """The properties of a task that a model depends on.

  Attributes:
    vocab_size: V, number of token ids, including padding.
    sequence_length: T, number of tokens of an example.
    coordinates: integer coordinates of every position: (row, column, box) on a
      board. The default is (index,). Nested tuples, so that the record is
      hashable.
    num_padding_tokens: number of ids at the end of the vocabulary that are not
      real tokens; models that decode distributions over tokens exclude them.
    num_answer_tokens: number of tokens at the end of every sequence that are
      predicted in one pass after all others were read; 0 if every token is
      predicted.
    coordinate_names: a name for each coordinate.
    packs_documents: whether rows contain several documents, which do not attend
      to each other. Batches then have "documents", i32 [B, T], the number of
      each token's document in its row, from 1; 0 for padding.
    predicts_next: whether targets are among the later inputs; models that
      attend to later tokens must reject the task.

  Raises:
    UserError: a row is longer than MAX_LENGTH.
  """

  vocab_size: int
  sequence_length: int
  coordinates: tuple[tuple[int, ...], ...] = dataclasses.field(
    default=(), repr=False
  )
  num_padding_tokens: int = 0
  num_answer_tokens: int = 0
  coordinate_names: tuple[str, ...] = ("position",)
  packs_documents: bool = False
  predicts_next: bool = False

  def __post_init__(self) -> None:
    if self.sequence_length > MAX_LENGTH:  # Before memory is used for it.
      raise UserError(
        f"section task: rows of {self.sequence_length:,} tokens exceed the"
        f" maximum of {MAX_LENGTH:,}"
      )
    if not self.coordinates:
      indices = tuple((i,) for i in range(self.sequence_length))
      object.__setattr__(self, "coordinates", indices)

  @property
  def num_tokens(self) -> int:
    """Number of real tokens, whose ids come first."""
    return self.vocab_size - self.num_padding_tokens


@dataclasses.dataclass(frozen=True)
class LoopOptions:
  """How a model's loop is executed.

  Attributes:
    execution: "scan", "while" or "unroll", see `loopjax.loop.driver.run_loop`.
    remat: a key of `loopjax.nn.remat.POLICIES`, or "auto".
    kernels: how the gated delta rule, MELT's update of its cache, and
      attention without a cache are computed: "xla", in plain JAX; "tpu", by
      Pallas kernels and splash attention; "gpu", by Pallas kernels and cuDNN's
      attention, on Hopper GPUs.
  """

  execution: str = "scan"
  remat: str = "none"
  kernels: str = "xla"


class Carried(NamedTuple):
  """State that a family carries from one optimizer step to the next.

  Attributes:
    by_example: pytree of arrays [B, ...] over the global batch; row b is passed
      to row b of the next batch.
  """

  by_example: Any = ()


class TokenScores(NamedTuple):
  """Losses and predictions, from which tasks compute scores.

  Attributes:
    losses: cross-entropy of the targets in nats, f32 [B, S].
    predicted: the most likely tokens, i32 [B, S]; of several, the smallest id.
  """

  losses: Array
  predicted: Array


class Output(NamedTuple):
  """The output of every model.

  Attributes:
    logits: f32 [B, T, V]; only of the answer tokens if only these are
      predicted.
    losses: unweighted auxiliary losses, f32 scalars by name.
    stats: statistics of each example, f32 [B] by name.
    loops: statistics of each loop, averaged over the batch, f32 [K] by name.
    trace: the requested records of each loop, [K, B, ...] by name; also
      "state" of a loop that is watched, see `loop.driver.Watched`.
    cache: the cache after these tokens, if the call had a cache.
    hidden: the input of the output layer for the same tokens as `logits`, f32
      [B, T, D], from which losses and scores are computed without logits; None
      if the family does not support this.
    tokens: scores of the same tokens, if an evaluation has computed them from
      `hidden`, see `losses.tokens.scores`.
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
  """The batches of a split.

  Attributes:
    batches: Grain dataset; element i is this process's part of global batch i,
      a dict of arrays [local batch, ...]. Infinite for the training split.
    groups: for each grouping of examples, the names of its groups, for which
      scores are also reported; batches have group ids as "group/<grouping>".
    facts: metadata for the run's summary, such as counts and hashes.
  """

  batches: "grain.MapDataset"
  groups: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  facts: Mapping[str, int | float | str] = dataclasses.field(
    default_factory=dict
  )
