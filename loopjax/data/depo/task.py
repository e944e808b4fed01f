"""The Depo task: k steps along a cycle given as edges.

The context is a shuffled cycle, left-padded; the answer chunk asks several
questions about it. A model that drops the context before the questions has to
remember the whole cycle, since it knows neither start nor number of hops
(Language Models Need Sleep, arXiv 2605.26099, section 6.2).

A cycle of n nodes is written as its edges in random order, each as the names of
a node and of its successor. A question is HOP_k, the name of a node, ANS, the
name of its k-th successor; k may exceed n (Allen-Zhu and Li, Physics of
Language Models 4.1, task Depo).
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

# A word is drawn with part of one 53-bit random number.
_MAX_WORDS = 2**32


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the cycles, and hops of the questions.

  The defaults are from Language Models Need Sleep, section 6.2, where 75
  nodes in 300 tokens and 10 questions in 60 imply words of one or two tokens.

  Token ids: V0 that do not end a word, V0 that do, K that ask for 1 to K hops,
  one before the answer, padding.

  Attributes:
    num_nodes: N, nodes of the largest cycle, and of every cycle in evaluation.
    max_hops: K; in training the hops k of a question are uniform over 1 .. K.
    num_queries: questions about one cycle, at most one per node.
    word_base: V0, choices for each token of a word.
    min_word, max_word: tokens of a node's name.
    context_length: tokens of the cycle, including the padding before it.
    min_nodes: nodes of the smallest cycle in training.
    num_eval_examples: number in validation, and in the test split, divided
      equally among the numbers of hops.
    eval_seed: seed of both; training uses the run's seed.
  """

  num_nodes: int = checks.setting(75, least=2)
  max_hops: int = checks.setting(16, least=1)
  num_queries: int = checks.setting(10, least=1)
  word_base: int = checks.setting(50, least=1)
  min_word: int = checks.setting(1, least=1)
  max_word: int = 2
  context_length: int = 300
  min_nodes: int = checks.setting(3, least=2)
  num_eval_examples: int = checks.setting(1000, least=1)
  eval_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    for small, large in (
      ("min_word", "max_word"),
      ("min_nodes", "num_nodes"),
      ("num_queries", "num_nodes"),  # Questions start at distinct nodes.
    ):
      if getattr(self, small) > getattr(self, large):
        raise UserError(
          f"task.{small}={getattr(self, small)} is greater than "
          f"task.{large}={getattr(self, large)}"
        )
    self._check_words()
    pipeline.check_equal_numbers(self.num_eval_examples, self.eval_hops, "hops")

  def _check_words(self) -> None:
    """Raises UserError unless the largest cycle has enough names and fits."""
    longest = 2 * self.num_nodes * self.max_word
    if self.context_length < longest:
      raise UserError(
        f"task.context_length={self.context_length} is too short for "
        f"task.num_nodes={self.num_nodes}: the longest cycle has {longest} "
        "tokens"
      )
    if self.num_words > _MAX_WORDS:
      raise UserError(
        f"task.max_word={self.max_word} tokens with "
        f"task.word_base={self.word_base} gives more than {_MAX_WORDS} words"
      )
    if self.num_nodes > self.num_words:
      raise UserError(
        f"task.num_nodes={self.num_nodes} exceeds the {self.num_words} words "
        f"of {self.min_word} to {self.max_word} tokens with "
        f"task.word_base={self.word_base}"
      )

  @property
  def word_counts(self) -> tuple[int, ...]:
    """Number of words of min_word, ..., max_word tokens."""
    lengths = range(self.min_word, self.max_word + 1)
    return tuple(self.word_base**length for length in lengths)

  @property
  def num_words(self) -> int:
    return sum(self.word_counts)

  @property
  def eval_hops(self) -> tuple[int, ...]:
    """1, 2, 4, ..., K."""
    return pipeline.doublings(self.max_hops)

  @property
  def first_hop(self) -> int:
    """Id of the token that asks for one hop."""
    return 2 * self.word_base

  @property
  def answer(self) -> int:
    """Id of the token before an answer."""
    return self.first_hop + self.max_hops

  @property
  def padding(self) -> int:
    return self.answer + 1


# Indices of the random streams, all different.
_SIZES, _ORDERS, _WORDS = range(3)


def training_sizes(
  config: Config, seed: int, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Sizes and hops of training examples.

  Args:
    seed: seed of the stream of examples.
    indices: in the stream, int [B].

  Returns:
    n int [B], p(n) proportional to 1 / (n + sqrt(N)) over min_nodes .. N, as in
    the task's public code (Allen-Zhu and Li); and k int [B, M], uniform over
    1 .. K.
  """
  numbers = pipeline.uniforms(
    pipeline.stream_seed(_SIZES, 0, seed), indices, 1 + config.num_queries
  )
  sizes = np.arange(config.min_nodes, config.num_nodes + 1)
  cumulative = np.cumsum(1 / (sizes + np.sqrt(config.num_nodes)))
  index = np.searchsorted(
    cumulative / cumulative[-1], numbers[:, 0], side="right"
  )
  return sizes[index], 1 + (numbers[:, 1:] * config.max_hops).astype(np.int64)


def examples(
  config: Config,
  seed: int,
  indices: np.ndarray,
  num_nodes: np.ndarray,
  hops: np.ndarray,
) -> dict[str, np.ndarray]:
  """Draws and writes cycles and questions.

  Args:
    seed: seed of the stream of examples.
    indices: in the stream, int [B].
    num_nodes: n of each cycle, int [B], N at most.
    hops: k of each question, int [B, M]; the first min(n, M) are asked.

  Returns:
    "inputs", "targets" and "weights" [B, T]: the cycle with padding before it,
    then the questions with padding after them. Weights are 1 where the next
    token belongs to an answer; other targets are 0.
  """
  orders = pipeline.uniforms(
    pipeline.stream_seed(_ORDERS, 0, seed), indices, 3 * config.num_nodes
  )
  names, sources, starts = (
    _permutations(numbers, num_nodes) for numbers in np.split(orders, 3, axis=1)
  )
  # Short words tend to be drawn first: places on the cycle are random.
  words = np.take_along_axis(
    draw_words(config, seed, indices, num_nodes), names, axis=1
  )
  nodes, lengths = _spell(config, words)
  letters = np.arange(config.max_word) < lengths[..., None]

  sinks = (sources + 1) % num_nodes[:, None]
  ends = np.stack([sources, sinks], axis=2).reshape(len(indices), -1)
  is_edge = np.arange(2 * config.num_nodes) < 2 * num_nodes[:, None]
  present = _take(letters, ends) & is_edge[..., None]
  context = pipeline.in_a_row(
    _take(nodes, ends),
    present,
    config.context_length,
    config.padding,
    front=True,
  )
  questions, is_answer = _questions(
    config, nodes, letters, num_nodes, starts[:, : config.num_queries], hops
  )
  inputs = np.concatenate([context, questions], axis=1)
  following = (  # Nothing is predicted at the last token.
    np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (questions, is_answer)
  )
  return pipeline.with_answers(inputs, *following)


def draw_words(
  config: Config, seed: int, indices: np.ndarray, num_nodes: np.ndarray
) -> np.ndarray:
  """Distinct words, drawn one after another.

  The length of a word is uniform, then each of its tokens; a word that the
  cycle already has is redrawn.

  Args:
    seed: seed of the stream of examples.
    indices: in the stream, int [B].
    num_nodes: words of each example, int [B].

  Returns:
    Numbers of words int64 [B, N], in the order of the draws; -1 after the last.
    Words are numbered by length: first all of min_word tokens.
  """
  drawn = np.empty((len(indices), 0), np.int64)
  # Examples must not depend on how often others are redrawn.
  for attempt in itertools.count():
    numbers = pipeline.uniforms(
      pipeline.stream_seed(_WORDS, attempt, seed),
      indices,
      2 * config.num_nodes << attempt,
    )
    drawn = np.concatenate([drawn, _word_numbers(config, numbers)], axis=1)
    new = _first_occurrences(drawn)
    num_distinct = np.cumsum(new, axis=1)
    if (num_distinct[:, -1] >= num_nodes).all():
      break
  words = np.full((len(indices), config.num_nodes), -1)
  is_word = np.arange(config.num_nodes) < num_nodes[:, None]
  words[is_word] = drawn[new & (num_distinct <= num_nodes[:, None])]
  return words


def answer_length(config: Config) -> int:
  """Tokens of the longest questions with their answers."""
  return config.num_queries * (2 + 2 * config.max_word)


def _word_numbers(config: Config, numbers: np.ndarray) -> np.ndarray:
  """Words from uniform numbers: the length is uniform, then the word."""
  counts = np.array(config.word_counts)
  scaled = numbers * len(counts)
  which = scaled.astype(np.int64)
  within = ((scaled - which) * counts[which]).astype(np.int64)
  return (np.cumsum(counts) - counts)[which] + within


def _spell(config: Config, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Tokens of words by number.

  Args:
    words: int [B, N], -1 for none.

  Returns:
    Tokens i32 [B, N, max_word], arbitrary after the end of a word; and lengths
    int [B, N].
  """
  counts = np.array(config.word_counts)
  ends = np.cumsum(counts)
  which = np.searchsorted(ends, words, side="right")
  lengths = config.min_word + which
  within = words - (ends - counts)[which]
  places = lengths[..., None] - 1 - np.arange(config.max_word)
  powers = np.array([config.word_base**p for p in range(config.max_word)])
  tokens = within[..., None] // powers[places] % config.word_base
  # Last tokens of words are distinct ids: no separator needed.
  tokens += config.word_base * (places == 0)
  return tokens.astype(np.int32), lengths


def _questions(
  config: Config,
  nodes: np.ndarray,
  letters: np.ndarray,
  num_nodes: np.ndarray,
  starts: np.ndarray,
  hops: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Questions and answers, one after another.

  Args:
    nodes: tokens of the names, by place on the cycle, i32 [B, N, max_word].
    letters: which tokens belong to a name, bool, the same shape.
    num_nodes: n int [B].
    starts: places at which the questions start, int [B, M].
    hops: k int [B, M].

  Returns:
    Tokens i32 [B, answer chunk], and which tokens belong to an answer, bool.
  """
  ends = (starts + hops) % num_nodes[:, None]
  hop = (config.first_hop - 1 + hops)[..., None].astype(np.int32)
  mark = np.full_like(hop, config.answer)
  tokens = [hop, _take(nodes, starts), mark, _take(nodes, ends)]
  always = np.ones(hop.shape, bool)
  answers = _take(letters, ends)
  present = [always, _take(letters, starts), always, answers]
  is_answer = [np.zeros_like(part) for part in present[:3]] + [answers]
  is_query = np.arange(config.num_queries) < num_nodes[:, None]
  used = np.concatenate(present, axis=2) & is_query[..., None]
  length = answer_length(config)
  return (
    pipeline.in_a_row(
      np.concatenate(tokens, axis=2), used, length, config.padding
    ),
    pipeline.in_a_row(np.concatenate(is_answer, axis=2), used, length, False),
  )


def _take(table: np.ndarray, places: np.ndarray) -> np.ndarray:
  """Entries of each example's own table: [B, N, W], [B, S] -> [B, S, W]."""
  return np.take_along_axis(table, places[..., None], axis=1)


def _permutations(numbers: np.ndarray, num_nodes: np.ndarray) -> np.ndarray:
  """Orders of 0 .. n - 1 from uniform numbers [B, N]; n, ... follow them."""
  inside = np.arange(numbers.shape[1]) < num_nodes[:, None]
  return np.argsort(np.where(inside, numbers, 1.0), axis=1, kind="stable")


def _first_occurrences(values: np.ndarray) -> np.ndarray:
  """Which values are first occurrences in their row, bool [B, S]."""
  order = np.argsort(values, axis=1, kind="stable")
  ordered = np.take_along_axis(values, order, axis=1)
  new = np.diff(ordered, axis=1, prepend=-1) != 0
  first = np.empty_like(new)
  np.put_along_axis(first, order, new, axis=1)
  return first


TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match", "answer_accuracy")
# Different from the streams above.
_STREAMS = {"train": 3, "test": 4, "validation": 5}


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the context and the answer chunk."""
  length = config.context_length + answer_length(config)
  return TaskSpec(
    vocab_size=config.padding + 1,
    sequence_length=length,
    num_padding_tokens=1,
    num_answer_tokens=answer_length(config),
    predicts_next=True,
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
  """Batches of a split.

  All splits are drawn, with separate random streams. There are too many cycles
  of more than a few nodes to repeat; the splits of the smallest tasks overlap.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b]
    and "group/hops" i32 [b]. Weights are 1 where the next token belongs to an
    answer; other targets are 0.
  """
  base = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], 0, base)
  all_hops = np.array(config.eval_hops)

  def make(indices):
    if split == "train":
      sizes, hops = training_sizes(config, stream, indices)
      return examples(config, stream, indices, sizes, hops)
    sizes = np.full(len(indices), config.num_nodes)
    group = indices % len(all_hops)  # Any prefix is a fair sample.
    hops = np.repeat(all_hops[group][:, None], config.num_queries, axis=1)
    batch = examples(config, stream, indices, sizes, hops)
    return {**batch, "group/hops": group.astype(np.int32)}

  groups = {"hops": tuple(map(str, config.eval_hops))}
  return pipeline.generated(
    make, split, config.num_eval_examples, batch_size, rows, groups=groups
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "loss": mean cross-entropy of the answers' tokens in nats (the paper's figure
  3); "answer_accuracy": fraction of answers whose tokens are all correct;
  "exact_match": all answers of the example are correct.
  """
  losses, right, weights = token_losses.graded(output, batch)
  wrong = weights * (1 - right)
  errors = jnp.cumsum(wrong, axis=1)
  # The tokens of an answer are adjacent, and no two answers are.
  starts = jnp.diff(weights, axis=1, prepend=0) == 1
  ends = jnp.diff(weights, axis=1, append=0) == -1
  before = jax.lax.cummax(jnp.where(starts, errors - wrong, 0.0), axis=1)
  answers = jnp.sum(ends & (errors == before), axis=1, dtype=jnp.float32)
  return {
    "loss": token_losses.row_means(losses, weights),
    "answer_accuracy": answers / jnp.sum(ends, axis=1, dtype=jnp.float32),
    "exact_match": (errors[:, -1] == 0).astype(jnp.float32),
  }
