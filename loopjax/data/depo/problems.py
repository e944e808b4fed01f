"""Cycles and questions about them, and how both are written as tokens.

A cycle of n nodes is written as its edges in random order, each as the names of
a node and of its successor. A question is HOP_k, the name of a node, ANS, the
name of its k-th successor; k may exceed n (Allen-Zhu and Li, Physics of
Language Models 4.1, task Depo).
"""

import itertools

import numpy as np

from loopjax.data import pipeline
from loopjax.data.depo.config import Config

# Indices of the random streams, all different.
_SIZES, _ORDERS, _WORDS = range(3)


def training_sizes(
  config: Config, seed: int, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Sizes and hops of training examples.

  Args:
    config: the task.
    seed: seed of the stream of examples.
    indices: in the stream, int [B].

  Returns:
    n int [B], p(n) proportional to 1 / (n + sqrt(N)) over min_nodes .. N; and k
    int [B, M], uniform over 1 .. K.
  """
  numbers = pipeline.uniforms(
    pipeline.stream_seed(_SIZES, 0, seed), indices, 1 + config.num_queries
  )
  sizes = np.arange(config.min_nodes, config.num_nodes + 1)
  below = np.cumsum(1 / (sizes + np.sqrt(config.num_nodes)))
  at = np.searchsorted(below / below[-1], numbers[:, 0], side="right")
  return sizes[at], 1 + (numbers[:, 1:] * config.max_hops).astype(np.int64)


def examples(
  config: Config,
  seed: int,
  indices: np.ndarray,
  num_nodes: np.ndarray,
  hops: np.ndarray,
) -> dict[str, np.ndarray]:
  """Draws and writes cycles and questions.

  Args:
    config: the task.
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
  # Words are ordered by length; their places on the cycle are random.
  words = np.take_along_axis(
    draw_words(config, seed, indices, num_nodes), names, axis=1
  )
  nodes, lengths = _spell(config, words)
  letters = np.arange(config.max_word) < lengths[..., None]

  sinks = (sources + 1) % num_nodes[:, None]
  ends = np.stack([sources, sinks], axis=2).reshape(len(indices), -1)
  is_edge = np.arange(2 * config.num_nodes) < 2 * num_nodes[:, None]
  present = _of(letters, ends) & is_edge[..., None]
  context = pipeline.in_a_row(
    _of(nodes, ends), present, config.context_length, config.padding, front=True
  )
  questions, is_answer = _questions(
    config, nodes, letters, num_nodes, starts[:, : config.num_queries], hops
  )
  inputs = np.concatenate([context, questions], axis=1)
  targets = np.zeros_like(inputs)  # Not padding, whose logit may be -inf.
  before = slice(config.context_length, -1)
  targets[:, before] = np.where(is_answer, questions, 0)[:, 1:]
  weights = np.zeros(inputs.shape, np.float32)
  weights[:, before] = is_answer[:, 1:]
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
  }


def draw_words(
  config: Config, seed: int, indices: np.ndarray, num_nodes: np.ndarray
) -> np.ndarray:
  """Distinct words, drawn one after another.

  The length of a word is uniform, then each of its tokens; a word that the
  cycle already has is redrawn.

  Args:
    config: the task.
    seed: seed of the stream of examples.
    indices: in the stream, int [B].
    num_nodes: words of each example, int [B].

  Returns:
    Numbers of words int64 [B, N], ordered by length; -1 after the last.
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
    how_many = np.cumsum(new, axis=1)
    if (how_many[:, -1] >= num_nodes).all():
      break
  words = np.full((len(indices), config.num_nodes), -1)
  taken = np.arange(config.num_nodes) < num_nodes[:, None]
  words[taken] = drawn[new & (how_many <= num_nodes[:, None])]
  return words


def answer_length(config: Config) -> int:
  """Tokens of the longest questions with their answers."""
  return config.num_queries * (2 + 2 * config.max_word)


def _word_numbers(config: Config, numbers: np.ndarray) -> np.ndarray:
  """Words from uniform numbers: a uniform length, then a uniform word of it."""
  counts = np.array(config.word_counts)
  scaled = numbers * len(counts)
  which = scaled.astype(np.int64)
  within = ((scaled - which) * counts[which]).astype(np.int64)
  return (np.cumsum(counts) - counts)[which] + within


def _spell(config: Config, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Tokens of words by number.

  Args:
    config: the task.
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
    config: the task.
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
  tokens = [hop, _of(nodes, starts), mark, _of(nodes, ends)]
  there = np.ones(hop.shape, bool)
  answers = _of(letters, ends)
  present = [there, _of(letters, starts), there, answers]
  of_answer = [np.zeros_like(part) for part in present[:3]] + [answers]
  is_query = np.arange(config.num_queries) < num_nodes[:, None]
  kept = np.concatenate(present, axis=2) & is_query[..., None]
  length = answer_length(config)
  return (
    pipeline.in_a_row(
      np.concatenate(tokens, axis=2), kept, length, config.padding
    ),
    pipeline.in_a_row(np.concatenate(of_answer, axis=2), kept, length, False),
  )


def _of(table: np.ndarray, places: np.ndarray) -> np.ndarray:
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
