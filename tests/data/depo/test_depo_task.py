"""The Depo task's random choices, batches and scores."""

import collections
import dataclasses
import functools
import itertools

import data_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.data.depo import task
from loopjax.types import Output


def assert_drawn_from(counts, chances):
  """Pearson's statistic is within five deviations of its mean."""
  counts, chances = np.array(counts, float), np.array(chances, float)
  assert counts.shape == chances.shape
  expected = counts.sum() * chances / chances.sum()
  assert expected.min() > 5
  freedom = len(counts) - 1
  statistic = ((counts - expected) ** 2 / expected).sum()
  assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_sizes_and_hops_of_training():
  settings = task.Config()
  sizes, hops = task.training_sizes(settings, 3, np.arange(40_000))
  assert (sizes.min(), sizes.max()) == (3, 75)
  chances = [1 / (n + np.sqrt(75)) for n in range(3, 76)]
  assert_drawn_from(np.bincount(sizes)[3:], chances)
  assert sizes.mean() == pytest.approx(27, abs=1)
  assert hops.shape == (40_000, 10)
  assert (hops.min(), hops.max()) == (1, 16)
  for column in hops.T:
    assert_drawn_from(np.bincount(column)[1:], np.ones(16))
  assert abs(np.corrcoef(sizes, hops[:, 0])[0, 1]) < 0.02
  assert abs(np.corrcoef(hops[:, 0], hops[:, 1])[0, 1]) < 0.02


def test_sizes_from_one_to_the_same():
  settings = task.Config(min_nodes=75)
  sizes, _ = task.training_sizes(settings, 0, np.arange(50))
  assert (sizes == 75).all()


def words(settings, num, count, seed=0):
  counts = np.full(num, count)
  return task.draw_words(settings, seed, np.arange(num), counts)


def test_words_are_drawn_one_after_another():
  """P(a, b) = p(a) p(b) / (1 - p(a)); a word of 2 tokens is as likely as one.

  There are two words of one token and four of two.
  """
  settings = task.Config(num_nodes=2, min_nodes=2, num_queries=2, word_base=2)
  chance = [1 / 4] * 2 + [1 / 8] * 4
  pairs = list(itertools.permutations(range(6), 2))
  chances = [chance[a] * chance[b] / (1 - chance[a]) for a, b in pairs]
  assert sum(chances) == pytest.approx(1)
  drawn = collections.Counter(map(tuple, words(settings, 20_000, 2).tolist()))
  assert set(drawn) <= set(pairs)
  assert_drawn_from([drawn[pair] for pair in pairs], chances)


def test_words_are_distinct_however_many():
  settings = task.Config(num_nodes=72, word_base=8)
  got = words(settings, 20, 72)
  np.testing.assert_array_equal(
    np.sort(got, axis=1), np.tile(range(72), (20, 1))
  )
  some = words(settings, 20, 40)
  np.testing.assert_array_equal(some[:, :40], got[:, :40])
  assert (some[:, 40:] == -1).all()


def test_words_do_not_depend_on_the_other_examples():
  """Some words need more attempts than others."""
  settings = task.Config(num_nodes=72, word_base=8)
  counts = np.array([5, 72, 30, 72, 2])
  together = task.draw_words(settings, 0, np.arange(5), counts)
  for index in range(5):
    alone = task.draw_words(
      settings, 0, np.array([index]), counts[index : index + 1]
    )
    np.testing.assert_array_equal(alone[0], together[index])


def test_orders_are_uniform_and_independent():
  """Cycle, order of the edges, order of the starts: 2 x 6 x 6 for 3 nodes."""
  settings = task.Config(
    num_nodes=3, num_queries=3, word_base=3, max_word=1, context_length=6
  )
  num = 7200
  got = task.examples(
    settings, 0, np.arange(num), np.full(num, 3), np.ones((num, 3), int)
  )["inputs"]
  assert (got >= 3).all()  # Every word ends with one such token.
  starts = got[:, [7, 11, 15]]
  seen = collections.Counter(
    (*edges, *start)
    for edges, start in zip(got[:, :6].tolist(), starts.tolist(), strict=True)
  )
  assert len(seen) == 72
  assert_drawn_from(list(seen.values()), np.ones(72))


def test_short_words_have_no_place_of_their_own():
  """They are drawn early, which must not affect the cycle.

  Successors of one-token nodes have one token as often as others.
  """
  settings = task.Config()
  num = 2000
  got = task.examples(
    settings, 0, np.arange(num), np.full(num, 75), np.ones((num, 10), int)
  )["inputs"][:, :300]
  short, both, expected = [], [], []
  for row in got.tolist():
    lengths, length = [], 0
    for token in row:
      length += token < 100
      if 50 <= token < 100:
        lengths.append(length)
        length = 0
    is_short = np.array(lengths).reshape(75, 2) == 1
    num_short = is_short[:, 0].sum()
    short.append(num_short / 75)
    both.append(is_short.all(axis=1).mean())
    expected.append(num_short / 75 * (num_short - 1) / 74)
  # After x draws of each length there are x words of two tokens, with few
  # duplicates, and 50 (1 - exp(-x / 50)) words of one token: 75 for x = 45.2.
  assert np.mean(short) == pytest.approx(1 - 45.2 / 75, abs=0.005)
  assert np.mean(both) == pytest.approx(np.mean(expected), abs=0.003)


PAPER = task.Config(num_eval_examples=50)
# Words of up to three tokens, more context than needed, K not a power of two.
OTHER = task.Config(
  num_nodes=9,
  max_hops=6,
  num_queries=4,
  word_base=3,
  max_word=3,
  context_length=60,
  min_nodes=2,
  num_eval_examples=40,
)
LONG = dataclasses.replace(OTHER, min_word=2, num_queries=9)
CONFIGS = {"paper": PAPER, "other": OTHER, "long": LONG}


joined = functools.partial(data_examples.joined, task)


def read_word(config, tokens):
  """Removes the first word: tokens below V0, then one below 2 V0."""
  word = [tokens.pop(0)]
  while word[-1] < config.word_base:
    word.append(tokens.pop(0))
  assert word[-1] < 2 * config.word_base
  assert config.min_word <= len(word) <= config.max_word
  return tuple(word)


def parse(config, inputs):
  """Edges {x: y} in order, [(k, x, y, where y begins)], padding [T]."""
  hop, answer = 2 * config.word_base, 2 * config.word_base + config.max_hops
  padding = inputs == answer + 1
  context = inputs[: config.context_length]
  tokens = context[~padding[: len(context)]].tolist()
  edges = {}
  while tokens:
    start = read_word(config, tokens)
    assert start not in edges
    edges[start] = read_word(config, tokens)
  chunk = inputs[config.context_length :].tolist()
  tokens = chunk[: chunk.index(answer + 1)] if answer + 1 in chunk else chunk
  questions, total = [], len(tokens)
  while tokens:
    hops = tokens.pop(0) - hop + 1
    assert 1 <= hops <= config.max_hops
    start = read_word(config, tokens)
    assert tokens.pop(0) == answer
    at = config.context_length + total - len(tokens)
    questions.append((hops, start, read_word(config, tokens), at))
  return edges, questions, padding


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_answer_is_so_many_steps_along_the_cycle(name, split):
  config = CONFIGS[name]
  got = joined(config, split, 12 if split == "train" else None)
  sizes = set()
  for row, inputs in enumerate(got["inputs"]):
    edges, questions, padding = parse(config, inputs)
    sizes.add(len(edges))
    # One cycle through every node.
    path = [next(iter(edges))]
    while edges[path[-1]] != path[0]:
      path.append(edges[path[-1]])
      assert len(path) <= len(edges)
    assert len(path) == len(edges)
    # As many questions as nodes, each with another start.
    assert len(questions) == min(config.num_queries, len(edges))
    assert len({start for _, start, _, _ in questions}) == len(questions)
    weights = np.zeros(len(inputs))
    targets = np.zeros(len(inputs))
    for hops, start, end, at in questions:
      assert end == path[(path.index(start) + hops) % len(path)]
      weights[at - 1 : at + len(end) - 1] = 1
      targets[at - 1 : at + len(end) - 1] = end
      assert tuple(inputs[at : at + len(end)]) == end
    np.testing.assert_array_equal(got["weights"][row], weights)
    np.testing.assert_array_equal(got["targets"][row], targets)
    # Padding is only before the context and after the answers.
    front = padding[: config.context_length]
    after = padding[config.context_length :]
    assert (np.diff(front.astype(int)) <= 0).all()
    assert (np.diff(after.astype(int)) >= 0).all()
    assert not front[-1]
    assert not after[0]
  if split == "test":
    assert sizes == {config.num_nodes}
  elif config is not PAPER:
    assert sizes == set(range(config.min_nodes, config.num_nodes + 1))
  else:
    assert min(sizes) < 10
    assert max(sizes) > 60


def test_edges_are_in_no_order():
  """The next edge starts where this one ends about once in a cycle."""
  got = joined(PAPER, "test")["inputs"]
  follows = []
  for inputs in got:
    edges = list(parse(PAPER, inputs)[0].items())
    follows += [a[1] == b[0] for a, b in itertools.pairwise(edges)]
  assert np.mean(follows) < 3 / 75


def test_the_longest_words_fill_everything():
  """All words have two tokens: 300 tokens of context and 60 of answers."""
  config = dataclasses.replace(PAPER, min_word=2)
  assert (joined(config, "test")["inputs"] != config.padding).all()


def test_evaluation_has_as_many_examples_for_each_number_of_hops():
  for config, hops in ((PAPER, (1, 2, 4, 8, 16)), (OTHER, (1, 2, 4, 6))):
    dataset = task.make_dataset(config, "test", batch_size=16, seed=0)
    assert dataset.groups == {"hops": tuple(map(str, hops))}
    assert dataset.facts == {"test_examples": config.num_eval_examples}
    got = joined(config, "test")
    groups = got["group/hops"][got["valid"]]
    assert len(groups) == config.num_eval_examples
    assert set(np.bincount(groups)) == {config.num_eval_examples // len(hops)}
    assert set(groups[: len(hops)].tolist()) == set(range(len(hops)))
    for inputs, group in zip(got["inputs"], got["group/hops"], strict=True):
      asked = {k for k, *_ in parse(config, inputs)[1]}
      assert asked == {hops[group]}
    inputs = got["inputs"][got["valid"]]
    assert len(np.unique(inputs, axis=0)) == len(inputs)


def test_scores_of_hand_made_answers():
  """Answers of two, one and two tokens; other predictions do not count."""
  batch = {
    "targets": jnp.array([[0, 1, 2, 0, 3, 0, 1, 2]] * 4),
    "weights": jnp.array([[0.0, 1, 1, 0, 1, 0, 1, 1]] * 4),
  }
  answers = jnp.array(
    [
      [3, 1, 2, 3, 3, 3, 1, 2],
      [0, 1, 0, 0, 3, 0, 1, 2],  # Half of the first.
      [0, 1, 2, 0, 0, 0, 0, 0],  # Neither the second nor the third.
      [0, 0, 2, 0, 3, 0, 1, 0],  # Only the second.
    ]
  )
  logits = 2.0 * jax.nn.one_hot(answers, 5)
  logits = logits.at[..., -1].set(-jnp.inf)  # As models mask padding.
  scores = task.score(Output(logits, {}, {}, {}, {}), batch)
  assert scores["exact_match"].tolist() == [1, 0, 0, 0]
  np.testing.assert_allclose(
    scores["answer_accuracy"], [1, 2 / 3, 1 / 3, 1 / 3], rtol=1e-6
  )
  small = np.log1p(3 * np.exp(-2.0))
  np.testing.assert_allclose(
    scores["loss"], small + np.array([0, 0.4, 1.2, 0.8]), rtol=1e-4
  )
  assert all(value.dtype == jnp.float32 for value in scores.values())
  # Some models have logits of the answer chunk only.
  last = task.score(Output(logits[:, 1:], {}, {}, {}, {}), batch)
  jax.tree.map(np.testing.assert_array_equal, last, scores)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_of_some_right_answers(name):
  """Some questions get an answer with one wrong token."""
  config = CONFIGS[name]
  got = joined(config, "test", 1)
  logits = np.array(
    20 * jax.nn.one_hot(got["targets"], task.spec(config).vocab_size)
  )
  shares = []
  for row, inputs in enumerate(got["inputs"]):
    questions = parse(config, inputs)[1]
    wrong = questions[: row % (len(questions) + 1)]
    for _, _, end, at in wrong:
      logits[row, at - 1 + row % len(end)] *= -1
    shares.append(1 - len(wrong) / len(questions))
  scores = task.score(Output(jnp.array(logits), {}, {}, {}, {}), got)
  np.testing.assert_allclose(scores["answer_accuracy"], shares, rtol=1e-6)
  np.testing.assert_array_equal(scores["exact_match"], np.array(shares) == 1)


def test_tokens_of_the_papers_sizes():
  settings = task.Config()
  assert settings.num_words == 2550
  assert (settings.first_hop, settings.answer) == (100, 116)
  assert settings.padding == 117


@pytest.mark.parametrize(
  ("max_hops", "expected"),
  [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))],
)
def test_evaluation_doubles_the_hops(max_hops, expected):
  settings = task.Config(max_hops=max_hops, num_eval_examples=120)
  assert settings.eval_hops == expected
