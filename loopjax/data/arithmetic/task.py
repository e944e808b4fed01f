"""The arithmetic task: the value of a nested expression, in one token.

Sums, differences and products modulo M in prefix notation, without intermediate
steps: a model has to look up results in its weights and to operate on its own
intermediate results (after Mano of Physics of Language Models 4.1, Allen-Zhu
2025).

Token ids: the numbers, the operators, ASK (asks for the value), padding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.data.arithmetic import expressions
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

TRACES: tuple[str, ...] = ()
HEADLINE = ("exact_match",)
_STREAMS, _OPERATIONS = {"train": 0, "validation": 1, "test": 2}, 3


@dataclasses.dataclass(frozen=True)
class Config:
  """The modulus and the sizes of expressions.

  Attributes:
    modulus: M (23 in the paper).
    max_operations: L; the number of operations is uniform in 1 .. L in
      training.
    num_eval_examples: number of draws for validation, and for the test split,
      divided equally among 1, 2, 4, ..., L operations. Duplicates are dropped:
      a split has few expressions of one operation.
    eval_seed: seed of both; training uses the run's seed.
  """

  modulus: int = 23
  max_operations: int = 10
  num_eval_examples: int = 1000
  eval_seed: int = 0

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.at_least(
      "task",
      self,
      modulus=11,  # Fewer: a split may lack one-operation expressions.
      max_operations=1,
      num_eval_examples=1,
      eval_seed=0,
    )
    if self.modulus > 2**20:
      raise UserError(f"task.modulus={self.modulus} must be at most {2**20}")
    if self.num_eval_examples % len(self.eval_operations):
      counts = ", ".join(map(str, self.eval_operations))
      raise UserError(
        f"task.num_eval_examples={self.num_eval_examples} must be a multiple "
        f"of {len(self.eval_operations)}: equal numbers for {counts} "
        "operations"
      )

  @property
  def eval_operations(self) -> tuple[int, ...]:
    """1, 2, 4, ..., L."""
    powers = range(self.max_operations.bit_length())
    return tuple(sorted({*(2**p for p in powers), self.max_operations}))

  @property
  def ask(self) -> int:
    """Id of the token before the value."""
    return self.modulus + expressions.NUM_OPERATORS


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the longest expression and its question."""
  length = 2 * config.max_operations + 2
  return TaskSpec(
    vocab_size=config.ask + 2,
    sequence_length=length,
    num_padding_tokens=1,
    num_answer_tokens=1,
  )


def abstract_batch(
  config: Config, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, spec(config).sequence_length)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split; no expression is in two splits, or twice in one.

  The training stream repeats expressions; an evaluation has each once.

  The arguments are `protocols.Task.make_dataset`'s.

  Returns:
    Batches of `abstract_batch`'s entries, padded in front, and in evaluation
    "valid" bool [b] and "group/operations" i32 [b]. Weights are 1 at the last
    token, whose target is the value; other targets are 0.
  """
  own = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], 0, own)

  def draw(positions, operations):
    return expressions.draw(
      config.modulus, config.max_operations, stream, positions, operations,
      split,
    )  # fmt: skip

  def make(tokens):
    last = np.full((len(tokens), 1), config.ask)
    questions = np.concatenate([tokens, last], axis=1)
    length = spec(config).sequence_length
    inputs = pipeline.in_a_row(
      questions, questions >= 0, length, config.ask + 1, front=True
    )
    targets = np.zeros(inputs.shape, np.int32)
    targets[:, -1] = expressions.values(config.modulus, tokens)
    weights = np.zeros(inputs.shape, np.float32)
    weights[:, -1] = 1
    return {
      "inputs": inputs.astype(np.int32),
      "targets": targets,
      "weights": weights,
    }

  if split == "train":

    def make_training(positions):
      counts = pipeline.stream_seed(_OPERATIONS, 0, stream)
      drawn = pipeline.uniforms(counts, positions, 1)[:, 0]
      operations = 1 + (drawn * config.max_operations).astype(np.int64)
      return make(draw(positions, operations))

    batches = pipeline.stream(make_training, batch_size, rows)
    return Dataset(batches)

  positions = np.arange(config.num_eval_examples)
  groups = positions % len(config.eval_operations)
  tokens = draw(positions, np.array(config.eval_operations)[groups])
  kept = expressions.distinct(tokens)  # Pseudorandom order.
  tokens, groups = tokens[kept], groups[kept].astype(np.int32)

  def make_evaluation(indices, _):
    return {**make(tokens[indices]), "group/operations": groups[indices]}

  batches = pipeline.evaluation_batches(
    make_evaluation, len(kept), batch_size, rows
  )
  return Dataset(
    batches,
    groups={"operations": tuple(map(str, config.eval_operations))},
    facts={f"{split}_examples": len(kept)},
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": the value is right; "loss": its cross-entropy in nats.
  """
  losses, predicted = token_losses.scores(output, batch["targets"])
  right = predicted[:, -1] == batch["targets"][:, -1]
  return {"exact_match": right.astype(jnp.float32), "loss": losses[:, -1]}
