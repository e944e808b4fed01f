"""Problems, parsed and solved from their text; batches, scores and floors."""

import collections
import dataclasses
import functools
import random
import re
import statistics

import data_examples
import jax.numpy as jnp
import numpy as np
import pytest
from gsm_reader import (
  NUMBER,
  below,
  canonical,
  needed,
  num_operations,
  operands,
  read,
  solve,
)
from tests_support import crossing

from loopjax.data import pipeline
from loopjax.data.gsm import config, language, task
from loopjax.types import Output

MODES = {"forward": 0.0, "reverse": 1.0}
SHORT = config.Config(context_length=180, min_length=120, max_length=180)


def examples(settings, num, operations, split="train", seed=0):
  counts = np.full(num, operations)
  return task.examples(settings, seed, np.arange(num), counts, split)


def texts(settings, num, operations, **kwargs):
  """Lines of each example, and its answer as a number."""
  got = examples(settings, num, operations, **kwargs)
  length = settings.context_length
  for inputs, targets in zip(got["inputs"], got["targets"], strict=True):
    *lines, answer = task.text(settings, inputs).split("\n")
    assert lines[0].startswith("how many") and lines[1].startswith("only")
    digits, rest = answer.removeprefix("ANS "), targets[length:].tolist()
    assert re.fullmatch(NUMBER, digits)
    end = [10]  # The id after the digits.
    assert rest == [*map(int, digits), *end, *[0] * (3 - len(digits))]
    yield lines, int(digits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operations", range(1, 9))
def test_every_answer_follows_from_its_text(operations, mode):
  """This many operations, one solution, and distractors without effect."""
  settings = dataclasses.replace(SHORT, reverse_fraction=MODES[mode])
  is_reverse = mode == "reverse" and operations > 1
  chance = random.Random(operations)
  for lines, answer in texts(settings, 200, operations):
    problem = read(lines)
    values = solve(problem)
    assert values[problem.asked] == answer
    assert all(1 <= value <= 999 for value in values.values())
    assert bool(problem.given) == is_reverse
    assert (problem.rules.get(problem.asked) == ("unknown",)) == is_reverse
    core = needed(problem)
    assert problem.asked in core
    assert num_operations(problem) == operations

    others = set(problem.rules) - set(core)
    counted = {name for total in core for name in problem.members[total]}
    assert not others & counted
    others |= set(problem.given) - set(core)
    kept = [line for line in lines if line.split(" equal ")[0] not in others]
    chance.shuffle(kept)
    alone = read(kept)
    assert solve(alone)[alone.asked] == answer
    assert set(alone.rules) == set(core) & set(problem.rules)
    assert set(alone.given) <= set(core)


@pytest.mark.parametrize("operations", [1, 2, 3, 5])
def test_problems_that_nobody_asks_for_look_like_the_one_that_is(operations):
  """They have as many operations, and no shared quantities."""
  settings = config.Config(reverse_fraction=0.5)
  num_decoys = []
  for lines, _ in texts(settings, 60, operations):
    problem = read(lines)
    core = set(needed(problem))
    if problem.given:  # Every total belongs to a problem.
      every = [below(problem, total) for total in problem.given]
      names = [name for part in every for name in part]
      assert len(set(names)) == len(names)
      for part in every:
        assert num_operations(problem, part) == operations
        rules = [problem.rules.get(name) for name in part]
        assert rules.count(("unknown",)) == 1
      num_decoys.append(len(every) - 1)
    else:
      every = [below(problem, name) for name in problem.rules]
      apart = [part for part in every if not core & set(part)]
      same = [p for p in apart if num_operations(problem, p) == operations]
      num_decoys.append(len(same))
  fit = {1: 15, 2: 8, 3: 4, 5: 2}[operations]  # In 150 or more tokens.
  assert min(num_decoys) >= 1
  assert np.mean(num_decoys) >= fit


def test_further_quantities_are_of_all_kinds_and_of_all_problems():
  """Each is a constant, or depends on one or two quantities of the problems."""
  kinds, of_core, totals = collections.Counter(), [], 0
  settings = config.Config(reverse_fraction=1.0)
  for lines, _ in texts(settings, 60, 4):
    problem = read(lines)
    every = {total: set(below(problem, total)) for total in problem.given}
    inside = set().union(*every.values())
    core = set(needed(problem))
    for name in set(problem.rules) - inside:
      parts = operands(problem, name)
      assert set(parts) <= inside
      kinds[problem.rules[name][0], len(parts)] += 1
      of_core += [part in core for part in parts]
      totals += len(core & inside) / len(inside) * len(parts)
  assert set(kinds) == {
    ("number", 0), ("plus", 1), ("times", 1), ("minus", 2), ("sum", 1),
    ("sum", 2),
  }  # fmt: skip
  share = np.array(list(kinds.values())) / sum(kinds.values())
  assert (share > 0.1).all()
  assert sum(of_core) == pytest.approx(totals, rel=0.15)


def lengths_of(settings, *args, **kwargs):
  """Tokens of questions and texts without padding."""
  context = examples(settings, *args, **kwargs)["inputs"]
  context = context[:, : settings.context_length]
  return (context != language.PADDING).sum(axis=1)


def test_texts_of_the_paper():
  """2,000 to 3,300 tokens, some hundreds of quantities, in evaluation too."""
  settings = config.Config(
    context_length=4096, min_length=2000, max_length=3300
  )
  lengths = lengths_of(settings, 40, 2)
  assert lengths.min() >= 2000 and lengths.max() <= 3300
  for lines, answer in texts(settings, 4, 8, split="test"):
    assert len(lines) > 150
    problem = read(lines)
    assert solve(problem)[problem.asked] == answer
    assert num_operations(problem) == 8


def test_lengths_are_uniform():
  """Up to one statement of at most 15 tokens."""
  settings = config.Config(min_length=300, max_length=500)
  lengths = lengths_of(settings, 1200, 2)
  assert lengths.min() >= 300 and lengths.max() <= 500
  shares = np.histogram(lengths, np.linspace(300, 500, 5))[0] / 1200
  np.testing.assert_allclose(shares, 0.25, atol=0.07)
  # Up to one length, and no further.
  fixed = dataclasses.replace(settings, min_length=400, max_length=400)
  lengths = lengths_of(fixed, 200, 5)
  assert lengths.min() >= 386 and lengths.max() <= 400
  bare = dataclasses.replace(settings, min_length=0, max_length=0)
  for lines, _ in texts(bare, 50, 5):
    problem = read(lines)
    assert set(problem.rules) <= set(needed(problem))


@pytest.mark.parametrize(("operations", "length"), [(1, 22), (2, 32), (3, 42)])
def test_the_shortest_context_is_as_long_as_the_longest_problem(
  operations, length
):
  settings = config.Config(
    context_length=length,
    train_ops=(operations,),
    eval_ops=(operations,),
    min_length=0,
    max_length=0,
  )
  got = examples(settings, 300, operations)
  real = got["inputs"][:, :length] != language.PADDING
  assert real.sum(axis=1).max() == length


def test_all_statements_are_in_no_order():
  """A quantity is stated before its operands as often as after."""
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
  """All kinds of quantities, all words, both modes, as often as requested."""
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
  for theme in language.THEMES:
    assert {theme.everything, *theme.items, *theme.places} <= seen


@functools.cache
def problems_of(operations, num, split):
  """Each problem without names, and the name of its final quantity."""
  found = []
  settings = config.Config(
    context_length=92, min_length=0, max_length=0, max_constant=10,
    train_ops=(operations,), eval_ops=(operations,), num_eval_examples=num,
  )  # fmt: skip
  dataset = task.make_dataset(settings, split, batch_size=num, seed=0)
  batch = next(pipeline.iterate(dataset.batches, num_threads=0))
  for inputs in batch["inputs"]:
    problem = read(task.text(settings, inputs).split("\n")[:-1])
    last = needed(problem)[0]
    found.append((canonical(problem, last), last))
  return found


@pytest.mark.long
@crossing("operations", [4, 5], manual=[5])
def test_no_problem_is_in_two_splits_with_other_names(operations):
  train = [problem for problem, _ in problems_of(operations, 1000, "train")]
  validation, test = (
    {problem for problem, _ in problems_of(operations, 250, split)}
    for split in ("validation", "test")
  )
  assert min(len(validation), len(test)) > 50
  assert not set(train) & (validation | test) and not validation & test
  # Problems repeat within a split.
  assert sum(problem in train[:750] for problem in train[750:]) > 20


@pytest.mark.long
@crossing("split", ["validation", "test"], manual=["test"])
def test_of_few_operations_the_last_name_counts(split):
  """There are 76,800 names and constants; both splits have all constants."""
  train = problems_of(1, 4000, "train")
  evaluation = set(problems_of(1, 700, split))
  assert not set(train) & evaluation
  assert sum(problem in train[:3000] for problem in train[3000:]) > 15
  constants = {problem for problem, _ in evaluation}
  assert constants == {problem for problem, _ in train}
  assert len(constants) == 10


def test_words_are_enough_and_differ():
  every = [
    word
    for t in language.THEMES
    for word in (t.everything, *t.items, *t.places)
  ]
  assert len(set(every)) == len(every) == 3 * 105
  for theme in language.THEMES:
    assert len(theme.items) == language.NUM_ITEMS
    assert len(theme.places) == language.NUM_PLACES


SMALL = task.Config(
  train_ops=(1, 3, 8),
  eval_ops=(1, 2, 5, 8),
  context_length=140,
  min_length=100,
  max_length=140,
  num_eval_examples=40,
)


joined = functools.partial(data_examples.joined, task)


def operations(config, inputs):
  """Number of operations in the text."""
  lines = task.text(config, inputs).split("\n")
  return num_operations(read(lines[:-1]))


def test_padding_and_weights_are_where_the_spec_says():
  """Padding before the context and after the answer; weights on the answer."""
  spec = task.spec(SMALL)
  for split in ("train", "test"):
    got = joined(SMALL, split, 3)
    real = spec.num_tokens
    assert language.PADDING == real == got["inputs"].max()
    assert got["targets"].max() < real
    assert spec.sequence_length == got["inputs"].shape[1] == 144
    valid = (got["inputs"] < real).astype(int)
    assert (np.diff(valid[:, :140], axis=1) >= 0).all()
    assert (np.diff(valid[:, 140:], axis=1) <= 0).all()
    assert valid[:, 139].all()
    # As many predictions as inputs: ANS and the digits.
    np.testing.assert_array_equal(got["weights"][:, 140:], valid[:, 140:])
    assert not got["weights"][:, :140].any()
    assert not got["targets"][got["weights"] == 0].any()
    chunk, targets = got["inputs"][:, 140:], got["targets"][:, 140:]
    both = valid[:, 141:] == 1
    np.testing.assert_array_equal(chunk[:, 1:][both], targets[:, :-1][both])


def test_training_has_all_numbers_of_operations_as_often():
  got = joined(SMALL, "train", 20)["inputs"]
  counts = collections.Counter(operations(SMALL, inputs) for inputs in got)
  assert set(counts) == {1, 3, 8}
  assert min(counts.values()) > 80


def test_evaluation_has_as_many_examples_for_each_number_of_operations():
  dataset = task.make_dataset(SMALL, "test", batch_size=16, seed=0)
  assert dataset.groups == {"operations": ("1", "2", "5", "8")}
  assert dataset.facts["test_examples"] == 40
  got = joined(SMALL, "test")
  groups = got["group/operations"][got["valid"]]
  assert groups.dtype == np.int32
  assert len(groups) == 40
  assert np.bincount(groups).tolist() == [10] * 4
  assert set(groups[:4].tolist()) == set(range(4))
  for inputs, group in zip(got["inputs"], got["group/operations"], strict=True):
    assert operations(SMALL, inputs) == SMALL.eval_ops[group]


@pytest.mark.parametrize("num_last", [4, 6])
def test_scores_of_hand_made_answers(num_last):
  """With logits of all tokens or of the answer chunk only."""
  batch = {
    "targets": jnp.array([[0, 0, 1, 2, 3, 0], [0, 0, 2, 3, 0, 0]]),
    "weights": jnp.array([[0.0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]]),
  }
  small = np.log1p(3 * np.exp(-2.0))
  for answers, exact, errors in (
    ([[3, 3, 1, 2, 3, 3], [1, 1, 2, 3, 1, 1]], [1, 1], [0, 0]),
    ([[0, 0, 1, 2, 0, 0], [0, 0, 2, 3, 0, 0]], [0, 1], [1 / 3, 0]),
    ([[0, 0, 0, 0, 3, 0], [0, 0, 2, 0, 0, 0]], [0, 0], [2 / 3, 1 / 2]),
  ):
    logits = 2 * np.eye(5, dtype=np.float32)[np.array(answers)]
    logits[..., -1] = -np.inf  # As models mask padding.
    output = Output(jnp.array(logits[:, -num_last:]), {}, {}, {}, {})
    scores = task.score(output, batch)
    assert scores["exact_match"].tolist() == exact
    np.testing.assert_allclose(
      scores["loss"], small + 2 * np.array(errors), rtol=1e-5
    )
    assert all(value.dtype == jnp.float32 for value in scores.values())


@pytest.mark.parametrize("length", [92, 512, 3300, 11_000])
def test_the_grid_has_twice_as_many_names_as_quantities(length):
  settings = task.Config(context_length=length, min_length=0, max_length=length)
  names = settings.grid_side**2
  assert names >= settings.num_names == 8 + length // 7
  if length < 5500:  # Largest possible size.
    assert 2 * settings.num_names <= names < 3 * settings.num_names


FEW = task.Config(
  train_ops=(1, 2),
  eval_ops=(1, 2, 3),
  context_length=140,
  min_length=60,
  max_length=140,
  num_eval_examples=300,
)


def facts(config, **kwargs):
  kwargs = {"batch_size": 32, "seed": 0, **kwargs}
  return dict(task.make_dataset(config, "test", **kwargs).facts)


@pytest.mark.long
def test_floors_are_those_of_the_texts():
  """Counted again in the readable text."""
  dataset = task.make_dataset(FEW, "test", batch_size=30, seed=0)
  answers, copied, added = (collections.defaultdict(list) for _ in range(3))
  for batch in pipeline.iterate(dataset.batches, num_threads=0):
    for inputs, group in zip(
      batch["inputs"], batch["group/operations"], strict=True
    ):
      text = task.text(FEW, inputs)
      numbers = [int(x) for x in re.findall(r"equal (\d+) \.", text)]
      answer = int(text.split("ANS ")[1])
      number = FEW.eval_ops[group]
      answers[number].append(answer)
      copied[number].append(numbers.count(answer) / len(numbers))
      added[number].append(sum(numbers) == answer)
  expected = {"test_examples": 300}
  for number in FEW.eval_ops:
    ((_, count),) = collections.Counter(answers[number]).most_common(1)
    of_number = f"operations={number}"
    expected |= {
      f"floor/most_frequent/{of_number}": count / 100,
      f"floor/lone_constant/{of_number}": statistics.mean(copied[number]),
      f"floor/sum_of_constants/{of_number}": statistics.mean(added[number]),
    }
  assert dataset.facts == pytest.approx(expected)


@pytest.mark.long
def test_floors_do_not_depend_on_who_reads():
  expected = facts(FEW)
  assert facts(FEW, rows=np.array([3, 7])) == expected
  assert facts(FEW, batch_size=8, seed=5) == expected
  assert facts(dataclasses.replace(FEW, eval_seed=1)) != expected


def test_without_distractors_a_lone_constant_is_the_answer():
  """The score of copying if there is only one number."""
  alone = dataclasses.replace(FEW, min_length=0, max_length=0)
  got = facts(alone)
  assert got["floor/lone_constant/operations=1"] == 1
  assert got["floor/lone_constant/operations=2"] == 1
  assert got["floor/sum_of_constants/operations=2"] == 1
  assert got["floor/lone_constant/operations=3"] > 0.5


@pytest.mark.long
def test_no_constant_is_copied_to_the_answer():
  """Over hundreds of problems; with one and two operations nearly all occur."""
  every = tuple(range(1, 9))
  got = facts(task.Config(eval_ops=every, num_eval_examples=800))
  for number in every:
    for rule in task.RULES:
      assert got[f"floor/{rule}/operations={number}"] < 0.2, (rule, number)


def test_numbers_after_a_token():
  before, other = language.word("equal"), language.word("plus")
  tokens = np.array(
    [
      [before, 1, 2, 3, other, 4, before, 5],
      [before, before, 7, 0, language.PADDING, before, other, before],
    ]
  )
  assert task.numbers_after(tokens, before).tolist() == [
    [123, 0, 0, 0, 0, 0, 5, 0],
    [0, 70, 0, 0, 0, 0, 0, 0],
  ]
