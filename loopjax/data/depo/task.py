"""The Depo task: k steps along a cycle given as edges.

The context is a shuffled cycle, left-padded; the answer chunk asks several
questions about it. A model that drops the context before the questions has to
remember the whole cycle, since it knows neither start nor number of hops
(Language Models Need Sleep, arXiv 2605.26099, section 6.2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.data import pipeline
from loopjax.data.depo import problems
from loopjax.data.depo.config import Config
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match", "answer_accuracy")
# Different from the streams in `problems`.
_STREAMS = {"train": 3, "test": 4, "validation": 5}


def answer_length(config: Config) -> int:
  """Tokens of the answer chunk at the end of every sequence."""
  return problems.answer_length(config)


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the context and the answer chunk."""
  length = config.context_length + answer_length(config)
  return TaskSpec(
    vocab_size=config.padding + 1,
    sequence_length=length,
    coordinates=tuple((i,) for i in range(length)),
    num_padding_tokens=1,
    num_answer_tokens=answer_length(config),
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

  All splits are drawn, with separate random streams. There are too many cycles
  of more than a few nodes to repeat; the splits of the smallest tasks overlap.

  Args:
    config: the task.
    split: "train", an endless stream of cycles of all sizes and questions of
      all hops; "validation" or "test": the largest cycles; all questions of a
      cycle have the same number of hops, 1, 2, 4, ... or K, by which scores are
      grouped.
    batch_size: global batch size, over all processes.
    seed: seed of the training stream.
    rows: the rows of every global batch that this process reads; all if None.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b]
    and "group/hops" i32 [b]. Weights are 1 where the next token belongs to an
    answer; other targets are 0.
  """
  if split == "train":
    stream = pipeline.stream_seed(_STREAMS[split], 0, seed)

    def make_training(positions):
      sizes, hops = problems.training_sizes(config, stream, positions)
      return problems.examples(config, stream, positions, sizes, hops)

    batches = pipeline.stream(make_training, batch_size, rows)
    return Dataset(batches, groups={}, facts={})

  stream = pipeline.stream_seed(_STREAMS[split], 0, config.eval_seed)
  all_hops = np.array(config.eval_hops)

  def make_evaluation(indices, _):
    sizes = np.full(len(indices), config.num_nodes)
    group = indices % len(all_hops)  # Any prefix is a fair sample.
    hops = np.repeat(all_hops[group][:, None], config.num_queries, axis=1)
    batch = problems.examples(config, stream, indices, sizes, hops)
    return {**batch, "group/hops": group.astype(np.int32)}

  batches = pipeline.evaluation_batches(
    make_evaluation, config.num_eval_examples, batch_size, rows
  )
  return Dataset(
    batches,
    groups={"hops": tuple(map(str, config.eval_hops))},
    facts={f"{split}_examples": config.num_eval_examples},
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "loss": mean cross-entropy of the answers' tokens in nats (the paper's figure
  3); "answer_accuracy": fraction of answers whose tokens are all correct;
  "exact_match": all answers of the example are correct.
  """
  losses, predicted = token_losses.scores(output, batch["targets"])
  num = losses.shape[1]  # All tokens, or only the last ones.
  targets, weights = batch["targets"][:, -num:], batch["weights"][:, -num:]
  wrong = jnp.where(predicted != targets, weights, 0.0)
  errors = jnp.cumsum(wrong, axis=1)
  # The tokens of an answer are adjacent, and no two answers are.
  starts = jnp.diff(weights, axis=1, prepend=0) == 1
  ends = jnp.diff(weights, axis=1, append=0) == -1
  before = jax.lax.cummax(jnp.where(starts, errors - wrong, 0.0), axis=1)
  right = jnp.sum(ends & (errors == before), axis=1, dtype=jnp.float32)
  return {
    "loss": jnp.sum(losses * weights, axis=1) / jnp.sum(weights, axis=1),
    "answer_accuracy": right / jnp.sum(ends, axis=1, dtype=jnp.float32),
    "exact_match": (errors[:, -1] == 0).astype(jnp.float32),
  }
