"""Every problem, read and solved again from its text alone."""

import collections
import dataclasses
import random
import re

import numpy as np
import pytest
from gsm_reader import (
  NUMBER,
  canonical,
  needed,
  num_operations,
  operands,
  read,
  solve,
)

from loopjax.data import pipeline
from loopjax.data.gsm import config, language, problems, words

MODES = {"forward": 0.0, "reverse": 1.0}
SHORT = config.Config(context_length=180)


def examples(settings, num, operations, held_out=False, seed=0):
  counts = np.full(num, operations)
  return problems.examples(settings, seed, np.arange(num), counts, held_out)


def texts(settings, num, operations, **kwargs):
  """Lines of each example, and its answer as a number."""
  got = examples(settings, num, operations, **kwargs)
  length = settings.context_length
  for inputs, targets in zip(got["inputs"], got["targets"], strict=True):
    *lines, answer = problems.text(settings, inputs).split("\n")
    assert lines[0].startswith("how many") and lines[1].startswith("only")
    digits, rest = answer.removeprefix("ANS "), targets[length:].tolist()
    assert re.fullmatch(NUMBER, digits)
    end = [10]  # The id behind the digits.
    assert rest == [*map(int, digits), *end, *[0] * (3 - len(digits))]
    yield lines, int(digits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operations", range(1, 9))
def test_every_answer_follows_from_its_text(operations, mode):
  """So many operations, one solution, and distractors that change nothing."""
  settings = dataclasses.replace(SHORT, reverse_fraction=MODES[mode])
  is_reverse = mode == "reverse" and operations > 1
  chance = random.Random(operations)
  for lines, answer in texts(settings, 200, operations):
    problem = read(lines)
    values = solve(problem)
    assert values[problem.asked] == answer
    assert all(1 <= value <= 999 for value in values.values())
    assert len(problem.given) == is_reverse
    assert (problem.rules.get(problem.asked) == ("unknown",)) == is_reverse
    core = needed(problem)
    assert problem.asked in core
    assert num_operations(problem) == operations

    others = set(problem.rules) - set(core)
    counted = {name for total in core for name in problem.members[total]}
    assert not others & counted
    for name in others:
      parts = operands(problem, name)
      assert len(parts) in (1, 2) and set(parts) <= set(core)
    kept = [line for line in lines if line.split(" equal ")[0] not in others]
    chance.shuffle(kept)
    alone = read(kept)
    assert solve(alone)[alone.asked] == answer
    assert set(alone.rules) == set(core) & set(problem.rules)
    some = read(
      [line for line in lines if line in kept or chance.random() < 0.5]
    )
    assert solve(some)[some.asked] == answer


def test_the_texts_of_the_paper_are_long():
  """Hundreds of quantities, in evaluation too."""
  settings = config.Config(context_length=3000)
  for lines, answer in texts(settings, 4, 8, held_out=True):
    assert len(lines) > 200
    problem = read(lines)
    assert solve(problem)[problem.asked] == answer
    assert num_operations(problem) == 8


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_distractors_fill_what_they_should(fraction):
  """As far as whole statements go: the longest distractor has 15 tokens."""
  settings = dataclasses.replace(SHORT, noise_fraction=fraction)
  bare = dataclasses.replace(settings, noise_fraction=0.0)
  got, without = (examples(c, 200, 5) for c in (settings, bare))
  lengths, core = (
    (batch["inputs"][:, :180] != language.PADDING).sum(axis=1)
    for batch in (got, without)
  )
  assert (lengths <= core + fraction * (180 - core)).all()
  assert fraction == 0 or (lengths > core + fraction * (180 - core) - 15).all()
  for inputs in got["inputs"]:
    lines = problems.text(settings, inputs).split("\n")
    problem = read(lines[:-1])
    assert bool(set(problem.rules) - set(needed(problem))) == (fraction > 0)


@pytest.mark.parametrize(("operations", "length"), [(1, 22), (2, 32), (3, 42)])
def test_the_shortest_context_is_as_long_as_the_longest_problem(
  operations, length
):
  settings = config.Config(
    context_length=length,
    train_ops=(operations,),
    eval_ops=(operations,),
    noise_fraction=0.0,
  )
  got = examples(settings, 300, operations)
  real = got["inputs"][:, :length] != language.PADDING
  assert real.sum(axis=1).max() == length


def test_all_statements_are_in_no_order():
  """A quantity is told before what it is made of as often as after."""
  before, places = [], []
  for lines, _ in texts(SHORT, 400, 6):
    problem = read(lines)
    order = [line.split(" equal ")[0] for line in lines[2:]]
    core = set(needed(problem))
    for place, name in enumerate(order):
      if name in core:
        places.append((place + 0.5) / len(order))
      if name in problem.rules:
        parts = operands(problem, name)
        before += [place < order.index(p) for p in parts if p in order]
  assert np.mean(before) == pytest.approx(0.5, abs=0.03)
  assert np.mean(places) == pytest.approx(0.5, abs=0.03)
  assert np.std(places) == pytest.approx(12**-0.5, abs=0.03)


def test_everything_that_can_be_said_is_said():
  """All kinds of quantities, all words, both modes as often as asked."""
  settings = dataclasses.replace(SHORT, reverse_fraction=0.25)
  kinds, shared, reverse, seen = collections.Counter(), [], [], set()
  for lines, _ in texts(settings, 800, 6):
    problem = read(lines)
    core = needed(problem)
    seen |= set(" ".join(lines).split())
    reverse.append(bool(problem.given))
    parts = [part for name in core for part in operands(problem, name)]
    shared.append(len(parts) > len(set(parts)))
    for name in core:
      rule = problem.rules.get(name, ("total",))[0]
      kinds[rule, len(operands(problem, name))] += 1
  assert set(kinds) == {
    ("number", 0),
    ("unknown", 0),
    ("plus", 1),
    ("times", 1),
    ("minus", 2),
    *(("sum", num) for num in (1, 2, 3)),
    *(("total", num) for num in (1, 2, 3)),
  }
  assert min(kinds.values()) > 20
  assert 0.1 < np.mean(shared) < 0.9
  assert np.mean(reverse) == pytest.approx(0.25, abs=0.05)
  for theme in words.THEMES:
    assert {theme.everything, *theme.items, *theme.places} <= seen


def problems_of(operations, num, held_out):
  """Each without names, and the name of what is computed last."""
  settings = config.Config(
    context_length=92, noise_fraction=0.0, max_constant=10
  )
  for lines, _ in texts(settings, num, operations, held_out=held_out):
    problem = read(lines)
    last = needed(problem)[0]
    yield canonical(problem, last), last


@pytest.mark.parametrize("operations", [4, 5])
def test_no_problem_of_evaluation_is_trained_on_with_other_names(operations):
  train = [problem for problem, _ in problems_of(operations, 1000, False)]
  evaluation = {problem for problem, _ in problems_of(operations, 250, True)}
  assert len(evaluation) > 50
  assert not set(train) & evaluation
  # Problems of one part do come again.
  assert sum(problem in train[:750] for problem in train[750:]) > 20


def test_of_few_operations_the_last_name_counts():
  """There are 48,000 names and constants, and all constants in both parts."""
  train = list(problems_of(1, 3000, False))
  evaluation = set(problems_of(1, 700, True))
  assert not set(train) & evaluation
  assert sum(problem in train[:2250] for problem in train[2250:]) > 15
  constants = {problem for problem, _ in evaluation}
  assert constants == {problem for problem, _ in train}
  assert len(constants) == 10


def test_words_are_enough_and_differ():
  every = [
    word for t in words.THEMES for word in (t.everything, *t.items, *t.places)
  ]
  assert len(set(every)) == len(every) == 3 * 81
  for theme in words.THEMES:
    assert len(theme.items) == words.NUM_ITEMS
    assert len(theme.places) == words.NUM_PLACES


def test_streams_of_random_numbers_differ():
  seeds = {
    pipeline.stream_seed(stream, part, seed)
    for stream in range(3)
    for part in range(3)
    for seed in range(3)
  }
  assert len(seeds) == 27
  numbers = [pipeline.uniforms(s, np.arange(2), 2).tobytes() for s in seeds]
  assert len(set(numbers)) == 27
