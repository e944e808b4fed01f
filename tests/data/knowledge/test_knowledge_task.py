"""People, statements and questions about them, and their splits."""

import collections
import functools
import itertools
import re

import data_examples
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.data.knowledge import language, task
from loopjax.types import Output

CONFIG = task.Config(num_people=60, sequence_length=64, num_eval_people=12)
VOCABULARY = language.vocabulary()
QUESTIONS = {  # By attribute, with the name as a group.
  "birth_date": r"When was (.*) born \?",
  "birth_city": r"Where was (.*) born \?",
  "university": r"Where did (.*) study \?",
  "major": r"What did (.*) study \?",
  "employer": r"Who employs (.*) \?",
  "work_city": r"Where does (.*) work \?",
}


joined = functools.partial(data_examples.joined, task, CONFIG)


def everybody(config=CONFIG):
  """The facts {name: {attribute: value}}, including pronouns."""
  some = task.draw_people(config.people_seed, np.arange(config.num_people))
  names = [language.decode(ids) for ids in some.names]
  return {
    name: {
      "pronoun": VOCABULARY.texts[pronoun],
      **{
        attribute: language.decode(value[value != language.ABSENT])
        for attribute, value in zip(language.ATTRIBUTES, values, strict=True)
      },
    }
    for name, pronoun, values in zip(
      names, some.pronouns, some.values, strict=True
    )
  }


def documents(batch, row):
  """The texts of a row, without a truncated last one."""
  return [
    language.decode(batch["targets"][row][here][:-1])
    for number in range(1, batch["documents"][row].max() + 1)
    if batch["targets"][row][
      here := np.flatnonzero(batch["documents"][row] == number)
    ][-1]
    == VOCABULARY.end
  ]


def statement(text, subject, value):
  """The attributes for which a sentence states a subject's value."""
  return [
    name
    for name, attribute in language.ATTRIBUTES.items()
    for phrase in attribute.phrases
    if text == f"{subject} {phrase} {value}"
  ]


def asked(text):
  """(name, attribute, answer) of a question, or None."""
  for attribute, pattern in QUESTIONS.items():
    if found := re.fullmatch(f"{pattern} (.*)", text):
      return found[1], attribute, found[2]
  return None


def test_the_sizes_are_those_of_the_paper():
  """47.6 bits of knowledge per person; every value has a distinct text."""
  assert sum(task.biography_bits().values()) == pytest.approx(47.6, abs=0.05)
  facts = task.make_dataset(CONFIG, "train", batch_size=1, seed=0).facts
  assert facts["knowledge_bits"] == pytest.approx(60 * 47.59, abs=0.5)
  assert facts["birth_city_bits"] == np.log2(200)
  for texts in language.VALUES.values():
    assert len(set(texts)) == len(texts)
  assert len(set(VOCABULARY.texts[-60:])) == 60
  names = {*language.NAME}
  assert len(set().union(*(language.VALUES[n] for n in names))) == 1800
  for attribute in language.ATTRIBUTES.values():
    assert len(attribute.phrases) == language.NUM_PHRASES
  lengths = [
    (language.sentences, lambda x: x.max(), language.MAX_SENTENCE),
    (language.questions, lambda x: x.min(), language.MIN_QUESTION),
  ]
  some = task.draw_people(0, np.arange(1))
  for make, best, expected in lengths:
    found = []
    for number in range(len(language.ATTRIBUTES)):
      for phrase in range(language.NUM_PHRASES):
        extra = [np.array([phrase])] if make is language.sentences else []
        tokens, _ = make(
          some.names, np.array([number]), *extra, some.values[:, number]
        )
        found.append((tokens != language.ABSENT).sum())
    assert best(np.array(found)) == expected


def test_all_that_is_said_and_asked_is_true():
  """Checked by an independent parser; questions are about some people only."""
  truth = everybody()
  assert len(truth) == 60
  known = list(truth)[:30]
  batch = joined("train", 100)
  orders, phrases, questioned = set(), set(), collections.Counter()
  told = collections.Counter()
  for row in range(len(batch["inputs"])):
    for text in documents(batch, row):
      if question := asked(text):
        name, attribute, answer = question
        assert truth[name][attribute] == answer
        questioned[name, attribute] += 1
        continue
      sentences = text.removesuffix(" .").split(" . ")
      name = " ".join(sentences[0].split()[:3])
      person, order = truth[name], []
      for number, sentence in enumerate(sentences):
        subject = person["pronoun"] if number else name
        (attribute,) = [
          attribute
          for attribute in QUESTIONS
          if attribute in statement(sentence, subject, person[attribute])
        ]
        order.append(attribute)
        phrases.add(
          sentence.removeprefix(subject).removesuffix(person[attribute])
        )
      assert sorted(order) == sorted(QUESTIONS)
      orders.add(tuple(order))
      told[name] += 1
  assert {name for name, _ in questioned} == set(known)
  assert set(told) == set(truth) and len(orders) > 300
  assert len(phrases) == 6 * language.NUM_PHRASES
  assert len(questioned) == 6 * 30
  num = sum(questioned.values())
  assert 0.45 < num / (num + sum(told.values())) < 0.65  # Long ones are cut.


def test_rows_are_full_and_shifted_by_one():
  batch = joined("train", 4)
  assert (batch["weights"] == 1).all()
  for row in range(len(batch["inputs"])):
    inputs, targets = batch["inputs"][row], batch["targets"][row]
    assert inputs[0] == VOCABULARY.end
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    # A document ends with its end token.
    after = 1 + np.cumsum(targets == VOCABULARY.end)
    np.testing.assert_array_equal(batch["documents"][row][1:], after[:-1])
  spec = task.spec(CONFIG)
  assert spec.vocab_size - spec.num_padding_tokens == VOCABULARY.padding
  assert batch["inputs"].max() == VOCABULARY.end


def test_nobody_is_asked_about_in_two_splits():
  truth = everybody()
  names = list(truth)
  expected = {
    "train_statements": set(names),
    "train_questions": set(names[:30]),
    "validation_questions": set(names[30:45]),
    "test_questions": set(names[45:]),
  }
  for split in ("validation", "test"):
    dataset = task.make_dataset(CONFIG, split, batch_size=1, seed=0)
    parts = dataset.groups["split"]
    assert parts == ("train_statements", "train_questions",
                     f"{split}_questions")  # fmt: skip
    batch = joined(split)
    valid, padded = batch["valid"], batch["documents"] == 0
    assert padded.any()
    assert (batch["inputs"][padded] == VOCABULARY.padding).all()
    assert valid.sum() == dataset.facts[f"{split}_examples"] == 3 * 6 * 12
    people_of = collections.defaultdict(set)
    for row in np.flatnonzero(valid):
      part = parts[batch["group/split"][row]]
      group = dataset.groups["attribute"][batch["group/attribute"][row]]
      (text,) = documents(batch, row)
      counted = batch["weights"][row] > 0
      value = language.decode(batch["targets"][row][counted])
      if part == "train_statements":
        name = " ".join(text.split()[:3])
        attribute = group.removeprefix("train_statements/")
        assert attribute in statement(text.removesuffix(" ."), name, value)
      else:
        name, attribute, answer = asked(text)
        assert answer == value and group == f"{part}/{attribute}"
      assert truth[name][attribute] == value
      people_of[part, attribute].add(name)
    assert len(people_of) == 18
    for (part, _), found in people_of.items():
      assert found <= expected[part] and len(found) == 12
    # Any prefix is a fair sample.
    assert np.bincount(batch["group/attribute"][:36]).tolist() == [2] * 18


def test_values_are_drawn_as_they_should():
  """Uniformly and independently; the employer determines the work city."""
  num = 40_000
  some = task.draw_people(3, np.arange(num))
  assert len(np.unique(some.names, axis=0)) == num
  values = some.values[..., 0]
  kinds = ("month", "city", "university", "major", "employer")
  indices = [
    values[:, column] - VOCABULARY.starts[kind]
    for column, kind in enumerate(kinds)
  ]
  for index, kind in zip(indices, kinds, strict=True):
    size = len(language.VALUES[kind])
    counts = np.bincount(index, minlength=size)
    assert len(counts) == size
    chi_squared = ((counts - num / size) ** 2 / (num / size)).sum()
    assert abs(chi_squared - size) < 6 * np.sqrt(2 * size)
  for one, other in itertools.combinations(indices, 2):
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.025
  work = values[:, 5] - VOCABULARY.starts["city"]
  np.testing.assert_array_equal(task.work_cities(3)[indices[4]], work)
  assert (task.draw_people(4, np.arange(9)).values != some.values[:9]).any()
  np.testing.assert_array_equal(
    task.draw_people(3, np.array([7, 5])).names, some.names[[7, 5]]
  )


def test_a_value_is_right_if_all_its_tokens_are():
  logits = np.zeros((3, 4, 8), np.float32)
  targets = np.array([[1, 2, 3, 4]] * 3)
  for row, guess in enumerate(([5, 2, 3, 5], [1, 2, 5, 4], [1, 2, 3, 4])):
    logits[row, np.arange(4), guess] = 2
  weights = np.array([[0, 1, 1, 0]] * 3, np.float32)
  scores = task.score(
    Output(jnp.array(logits), {}, {}, {}, {}),
    {"targets": targets, "weights": weights},
  )
  assert scores["exact_match"].tolist() == [1, 0, 1]
  expected = 2 * np.log(np.exp(2) + 7) - np.array([4, 2, 4])
  np.testing.assert_allclose(scores["loss"], expected, rtol=1e-5)
