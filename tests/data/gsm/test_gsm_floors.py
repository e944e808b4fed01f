"""Floors: scores of simple rules that do not solve the problem."""

import collections
import dataclasses
import re
import statistics

import numpy as np
import pytest

from loopjax.data import pipeline
from loopjax.data.gsm import language, problems, task

SMALL = task.Config(
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
  dataset = task.make_dataset(SMALL, "test", batch_size=30, seed=0)
  answers, copied, added = (collections.defaultdict(list) for _ in range(3))
  for batch in pipeline.iterate(dataset.batches, num_threads=0):
    for inputs, group in zip(
      batch["inputs"], batch["group/operations"], strict=True
    ):
      text = problems.text(SMALL, inputs)
      numbers = [int(x) for x in re.findall(r"equal (\d+) \.", text)]
      answer = int(text.split("ANS ")[1])
      number = SMALL.eval_ops[group]
      answers[number].append(answer)
      copied[number].append(numbers.count(answer) / len(numbers))
      added[number].append(sum(numbers) == answer)
  expected = {"test_examples": 300}
  for number in SMALL.eval_ops:
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
  expected = facts(SMALL)
  assert facts(SMALL, rows=np.array([3, 7])) == expected
  assert facts(SMALL, batch_size=8, seed=5) == expected
  assert facts(dataclasses.replace(SMALL, eval_seed=1)) != expected


def test_without_distractors_a_lone_constant_is_the_answer():
  """The score of copying if there is only one number."""
  alone = dataclasses.replace(SMALL, min_length=0, max_length=0)
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
