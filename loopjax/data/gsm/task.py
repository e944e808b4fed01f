"""The GSM task: answer a word problem within a long text directly.

The question comes first: a model knows what to look for in the text, which it
may have dropped when it answers, without intermediate steps (Language Models
Need Sleep, arXiv 2605.26099, section 6.3). Problems are in the spirit of
GSM-Infinite (arXiv 2502.05252), with our own vocabulary.
Floors are scores of heuristics that do not solve the problem.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import language, problems
from loopjax.data.gsm.config import Config
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

RULES = ("most_frequent", "lone_constant", "sum_of_constants")
_CHUNK = 128  # Examples in memory at once.


def exact_match(
  config: Config, make: Callable[[np.ndarray], Mapping[str, np.ndarray]]
) -> dict[str, float]:
  """Floors over all evaluation examples, not only this process's.

  Constants are the numbers that a quantity is said to equal, including given
  totals but not addends and factors.

  "most_frequent" gives the most common answer; "lone_constant" copies a random
  constant, or the only one (the floor is the expected score);
  "sum_of_constants" adds up all constants.

  Args:
    make: function from indices of examples [b] to their batch.

  Returns:
    Exact match, 0 to 1, by "floor/<rule>/operations=<number>".
  """
  indices = np.arange(config.num_eval_examples)
  parts = [
    _answers_and_hits(make(indices[start : start + _CHUNK]))
    for start in range(0, len(indices), _CHUNK)
  ]
  groups, answers, *hits = (np.concatenate(x) for x in zip(*parts, strict=True))
  floors = {}
  for group, number in enumerate(config.eval_ops):
    of_group = groups == group
    values = (
      np.bincount(answers[of_group]).max() / of_group.sum(),
      *(hit[of_group].mean() for hit in hits),
    )
    for name, value in zip(RULES, values, strict=True):
      floors[f"floor/{name}/operations={number}"] = float(value)
  return floors


def _answers_and_hits(
  batch: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, ...]:
  """Groups and answers int [b]; scores of the last two rules, f64 [b]."""
  inputs = batch["inputs"]
  answers = numbers_after(inputs, language.ANSWER).max(axis=1)
  constants = numbers_after(inputs, language.word("equal"))
  right = (constants == answers[:, None]).sum(axis=1)
  copied = right / (constants > 0).sum(axis=1)
  added = (constants.sum(axis=1) == answers).astype(np.float64)
  return batch["group/operations"], answers, copied, added


def numbers_after(tokens: np.ndarray, before: int) -> np.ndarray:
  """Numbers that directly follow a token.

  Args:
    tokens: ids, int [B, T].
    before: id of the token.

  Returns:
    int64 [B, T]: at the position of the token, the number after it; 0 if there
    is none.
  """
  values = np.zeros(tokens.shape, np.int64)
  goes_on = tokens == before
  for place in range(1, language.NUM_DIGITS + 1):
    digits = np.full_like(tokens, language.PADDING)
    digits[:, :-place] = tokens[:, place:]
    goes_on &= digits < 10
    values = np.where(goes_on, 10 * values + digits, values)
  return values


TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match",)
# Different from the streams in `problems`.
_STREAMS, _OPERATIONS = {"train": 4, "test": 5, "validation": 7}, 6


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the context and the answer chunk."""
  length = config.context_length + problems.ANSWER_LENGTH
  return TaskSpec(
    vocab_size=language.PADDING + 1,
    sequence_length=length,
    num_padding_tokens=1,
    num_answer_tokens=problems.ANSWER_LENGTH,
    predicts_next=True,
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
  """Batches of a split.

  All splits are drawn, with separate random streams and from disjoint sets of
  problems: problems that differ only in names and order are in the same set.
  There are few problems of up to three operations; for these, the name of the
  final quantity is part of the problem (`graphs.in_split`).

  The arguments are `protocols.Task.make_dataset`'s.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b]
    and "group/operations" i32 [b]. Weights are 1 in the answer chunk where a
    digit or END is next; other targets are 0. The facts of the test split
    include the scores of simple rules on it (`exact_match`).
  """
  if split == "train":
    stream = pipeline.stream_seed(_STREAMS[split], 0, seed)
    train_ops = np.array(config.train_ops)

    def make_training(positions):
      numbers = pipeline.uniforms(
        pipeline.stream_seed(_OPERATIONS, 0, stream), positions, 1
      )
      operations = train_ops[(numbers[:, 0] * len(train_ops)).astype(np.int64)]
      return problems.examples(config, stream, positions, operations, split)

    batches = pipeline.stream(make_training, batch_size, rows)
    return Dataset(batches)

  stream = pipeline.stream_seed(_STREAMS[split], 0, config.eval_seed)
  eval_ops = np.array(config.eval_ops)

  def make_evaluation(indices, _):
    group = indices % len(eval_ops)  # Any prefix is a fair sample.
    batch = problems.examples(config, stream, indices, eval_ops[group], split)
    return {**batch, "group/operations": group.astype(np.int32)}

  batches = pipeline.evaluation_batches(
    make_evaluation, config.num_eval_examples, batch_size, rows
  )
  return Dataset(
    batches,
    groups={"operations": tuple(map(str, config.eval_ops))},
    facts={
      f"{split}_examples": config.num_eval_examples,
      **(
        exact_match(config, lambda i: make_evaluation(i, i))
        if split == "test"
        else {}
      ),
    },
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": all digits and END are correct (the paper's accuracy); "loss":
  their mean cross-entropy in nats.
  """
  losses, predicted = token_losses.scores(output, batch["targets"])
  num = losses.shape[1]  # All tokens, or only the last ones.
  targets, weights = batch["targets"][:, -num:], batch["weights"][:, -num:]
  wrong = jnp.where(predicted != targets, weights, 0.0)
  return {
    "exact_match": (jnp.sum(wrong, axis=1) == 0).astype(jnp.float32),
    "loss": jnp.sum(losses * weights, axis=1) / jnp.sum(weights, axis=1),
  }
