"""The arithmetic task: the value of a nested expression, in one token.

Sums, differences and products modulo M in prefix notation, without intermediate
steps: a model has to look up results in its weights and to operate on its own
intermediate results (after Mano of Physics of Language Models 4.1, Allen-Zhu
2025).

An expression without operations is a number; any other is an operator and two
expressions that share the remaining operations, with uniform probability.

Token ids: the numbers, the operators, ASK (asks for the value), padding.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

NUM_OPERATORS = 3  # Sum, difference and product.
_PARTS = 20  # Hash buckets of expressions, divided among the splits.
PARTS = {
  "train": np.arange(0, 16, dtype=np.uint64),
  "validation": np.arange(16, 18, dtype=np.uint64),
  "test": np.arange(18, 20, dtype=np.uint64),
}


def draw_expressions(
  modulus: int,
  max_operations: int,
  stream: int,
  positions: np.ndarray,
  operations: np.ndarray,
  split: str,
) -> np.ndarray:
  """Random expressions of a split; those of other splits are redrawn.

  Args:
    modulus: M; numbers are 0 .. M - 1.
    max_operations: maximum number of operations.
    stream: number of the random stream.
    positions: positions in the stream, int [B].
    operations: number of operations of each expression, from 1, int [B].
    split: "train", "validation" or "test".

  Returns:
    Tokens int64 [B, 2 max_operations + 1]: numbers are their own ids, operators
    start at M, and -1 fills the rest.
  """
  width = 2 * max_operations + 1
  tokens = np.full((len(positions), width), -1)
  pending = np.arange(len(positions))
  for attempt in itertools.count():
    seed = pipeline.stream_seed(stream, attempt)
    numbers = pipeline.uniforms(seed, positions[pending], 2 * width)
    drawn = _expressions(modulus, operations[pending], numbers)
    tokens[pending] = drawn
    outside = ~np.isin(_hash(drawn) % np.uint64(_PARTS), PARTS[split])
    pending = pending[outside]
    if not len(pending):
      break
  return tokens


def distinct(tokens: np.ndarray) -> np.ndarray:
  """Positions of distinct expressions, in pseudorandom order."""
  _, first = np.unique(_hash(tokens), return_index=True)
  return first


def values_of(modulus: int, tokens: np.ndarray) -> np.ndarray:
  """The values of expressions, int64 [B], in 0 .. modulus - 1."""
  batch, width = tokens.shape
  rows = np.arange(batch)
  stack = np.zeros((batch, width + 2), np.int64)
  height = np.zeros(batch, np.int64)
  for token in tokens.T[::-1]:  # Operands are evaluated before their operator.
    left = stack[rows, height - 1]
    right = stack[rows, height - 2]
    results = np.stack([left + right, left - right, left * right])
    is_operator = token >= modulus
    kind = np.where(is_operator, token - modulus, 0)
    value = np.where(is_operator, results[kind, rows] % modulus, token)
    height += np.where(is_operator, -1, np.where(token >= 0, 1, 0))
    is_token = token >= 0
    stack[rows[is_token], height[is_token] - 1] = value[is_token]
  return stack[:, 0]


def _expressions(
  modulus: int, operations: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
  """Expressions from uniform numbers [B, 2 width], int64 [B, width]."""
  batch, width = len(operations), numbers.shape[1] // 2
  rows = np.arange(batch)
  # Stack of the sizes (in operations) of expressions yet to be written.
  stack = np.zeros((batch, width + 2), np.int64)
  stack[:, 0] = operations
  height = np.ones(batch, np.int64)
  tokens = np.full((batch, width), -1)
  for place in range(width):
    active = height > 0
    num_operations = stack[rows, height - 1]
    which, share = numbers[:, 2 * place], numbers[:, 2 * place + 1]
    number = (which * modulus).astype(np.int64)
    operator = modulus + (which * NUM_OPERATORS).astype(np.int64)
    is_operator = active & (num_operations > 0)
    token = np.where(is_operator, operator, number)
    tokens[:, place] = np.where(active, token, -1)
    left = (share * num_operations).astype(np.int64)
    inner = rows[is_operator]
    top = height[is_operator]
    stack[inner, top - 1] = (num_operations - 1 - left)[is_operator]
    stack[inner, top] = left[is_operator]
    height += np.where(is_operator, 1, np.where(active, -1, 0))
  return tokens


def _hash(tokens: np.ndarray) -> np.ndarray:
  """A hash of every row, uint64 [B]."""
  total = np.zeros(len(tokens), np.uint64)
  for column in tokens.T:
    total = pipeline.splitmix64(total ^ (column + 1).astype(np.uint64))
  return total


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

  # Fewer: a split may lack one-operation expressions.
  modulus: int = checks.setting(23, within="[11, 1_048_576]")
  max_operations: int = checks.setting(10, least=1)
  num_eval_examples: int = checks.setting(1000, least=1)
  eval_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    pipeline.check_equal_numbers(
      self.num_eval_examples, self.eval_operations, "operations"
    )

  @property
  def eval_operations(self) -> tuple[int, ...]:
    """1, 2, 4, ..., L."""
    return pipeline.doublings(self.max_operations)

  @property
  def ask(self) -> int:
    """Id of the token before the value."""
    return self.modulus + NUM_OPERATORS


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the longest expression and its question."""
  length = 2 * config.max_operations + 2
  return TaskSpec(
    vocab_size=config.ask + 2,
    sequence_length=length,
    num_padding_tokens=1,
    num_answer_tokens=1,
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
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

  Returns:
    Batches of `abstract_batch`'s entries, padded in front, and in evaluation
    "valid" bool [b] and "group/operations" i32 [b]. Weights are 1 at the last
    token, whose target is the value; other targets are 0.
  """
  base = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], 0, base)

  def drawn_tokens(positions, operations):
    return draw_expressions(
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
    values = values_of(config.modulus, tokens)
    return pipeline.with_answers(inputs, values[:, None])

  if split == "train":

    def make_training(positions):
      counts = pipeline.stream_seed(_OPERATIONS, 0, stream)
      drawn = pipeline.uniforms(counts, positions, 1)[:, 0]
      operations = 1 + (drawn * config.max_operations).astype(np.int64)
      return make(drawn_tokens(positions, operations))

    batches = pipeline.stream(make_training, batch_size, rows)
    return Dataset(batches)

  positions = np.arange(config.num_eval_examples)
  groups = positions % len(config.eval_operations)
  tokens = drawn_tokens(positions, np.array(config.eval_operations)[groups])
  unique = distinct(tokens)  # Pseudorandom order.
  tokens, groups = tokens[unique], groups[unique].astype(np.int32)

  def make_evaluation(indices, _):
    return {**make(tokens[indices]), "group/operations": groups[indices]}

  batches = pipeline.evaluation_batches(
    make_evaluation, len(unique), batch_size, rows
  )
  return Dataset(
    batches,
    groups={"operations": tuple(map(str, config.eval_operations))},
    facts={f"{split}_examples": len(unique)},
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": the value is right; "loss": its cross-entropy in nats.
  """
  losses, predicted = token_losses.scores(output, batch["targets"])
  correct = predicted[:, -1] == batch["targets"][:, -1]
  return {"exact_match": correct.astype(jnp.float32), "loss": losses[:, -1]}
