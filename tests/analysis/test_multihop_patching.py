"""Patching: pairs by brute force, and a model that must follow the bridge."""

import multihop_examples as examples
import numpy as np
import pytest

from loopjax.analysis.multihop import interventions, rows
from loopjax.data.multihop import task

NUM_ENTITIES = 2 * examples.CONFIG.num_entities


def facts_by_name():
  facts = task.make_graph(examples.CONFIG)
  return {
    (int(head), int(relation)): int(tail)
    for head, relation, tail in zip(
      facts.heads, facts.relations, facts.tails, strict=True
    )
  }


def test_relations_are_followed_where_facts_exist():
  facts, table = facts_by_name(), examples.make_table()
  assert (table >= 0).sum() == len(facts)
  rng = np.random.default_rng(1)
  entities = rng.integers(0, NUM_ENTITIES, 200)
  relations = rng.integers(0, examples.CONFIG.num_relations, (200, 2))
  got = interventions.follow(table, entities, relations)
  for entity, (first, second), tail in zip(
    entities.tolist(), relations.tolist(), got.tolist(), strict=True
  ):
    middle = facts.get((entity, first))
    assert tail == facts.get((middle, second), -1)
  assert -1 in got
  assert max(got) >= 0


def test_pairs_qualify_and_are_counted():
  table = examples.make_table()
  question_set = examples.make_questions()
  members = np.flatnonzero(
    question_set.split == question_set.splits.index("test_id_2")
  )
  bridges, answers = (
    question_set.entities[members, 1],
    question_set.answers[members],
  )
  relations = question_set.relations[members, 1:2] - NUM_ENTITIES
  pairs = interventions.make_pairs(
    table, bridges, relations, answers, np.random.default_rng(0)
  )
  facts, num, qualified = facts_by_name(), len(members), 0
  for row in range(num):
    ends = {
      other: facts.get((int(bridges[other]), int(relations[row, 0])), -1)
      for other in range(num)
      if other != row
    }
    fitting = {
      other: end
      for other, end in ends.items()
      if end >= 0 and end != answers[row]
    }
    qualified += len(fitting)
    donor = int(pairs.donor[row])
    assert (donor >= 0) == bool(fitting)
    if fitting:
      assert pairs.implied[row] == fitting[donor]
      assert bridges[donor] != bridges[row]
  assert pairs.examined == num * (num - 1)  # Fewer than 64 candidates each.
  assert pairs.qualified == qualified
  assert len(set(pairs.donor.tolist())) > num // 3


def test_only_some_candidates_are_examined():
  num = 200
  pairs = interventions.make_pairs(
    np.array([[1], [0]]),
    np.arange(num) % 2,
    np.zeros((num, 1), int),
    1 - np.arange(num) % 2,
    np.random.default_rng(0),
  )
  assert pairs.examined == 64 * num
  assert (pairs.donor >= 0).all()
  # For an even bridge the answer is 1: the donor is odd and leads to 0.
  assert np.array_equal(pairs.donor % 2, 1 - np.arange(num) % 2)
  assert np.array_equal(pairs.implied, np.arange(num) % 2)


@pytest.mark.parametrize("loop", [1, 2])
def test_a_model_that_composes_follows_the_donors_bridge(loop):
  question_set, model = examples.make_questions(), examples.instrument()
  observed = model.observe(question_set)
  (place,) = interventions.places(question_set, 3, loop)
  found, notes = interventions.patch(
    model, question_set, observed, place, examples.make_table(), NUM_ENTITIES
  )
  assert notes == []
  hops = ("2", "3") if loop == 1 else ("3",)
  splits = [f"{kind}_{h}" for kind in ("train", "test_id", "test_ood")
            for h in hops]  # fmt: skip
  assert [row["split"] for row in found[::2]] == splits
  for row in rows.select(found, "patching", place="patched"):
    assert (row["loop"], row["position"]) == (loop, loop)
    assert (row["implied"], row["stays"]) == (1, 0)
    assert 0 < row["qualified"] < 1
    assert row["count"] > 10
  for row in rows.select(found, "patching", place="control"):
    assert row["position"] == 0
    assert (row["implied"], row["stays"]) == (0, 1)


def test_what_stays_is_the_answer_of_the_model():
  """Its writes are too weak for later loops, and its answers are wrong."""
  question_set = examples.make_questions()
  model = examples.instrument(strength=0.1)
  observed = model.observe(question_set)
  (place,) = interventions.places(question_set, 3, 1)
  found, _ = interventions.patch(
    model, question_set, observed, place, examples.make_table(), NUM_ENTITIES
  )
  assert len(found) == 2 * 6  # Patched and control, of every split.
  for row in found:
    assert (row["implied"], row["stays"]) == (0, 1), row


def test_patching_a_question_with_itself_changes_nothing():
  question_set = examples.make_questions()
  model = examples.instrument(strength=0.6)
  observed = model.observe(question_set)
  members = np.flatnonzero(question_set.hops == 3)
  before = observed.prediction[members, -1, question_set.last[members]]
  own = np.arange(len(members))
  for donor, same in ((own, True), (0 * own - 1, True), (own[::-1], False)):
    after = interventions.patched_answers(
      model, question_set, members, donor, 2, np.full(len(members), 2)
    )
    assert np.array_equal(before, after) == same


def test_splits_without_a_pair_are_named():
  """A relation that only the question's bridge has."""
  question_set, model = examples.make_questions(), examples.instrument()
  observed = model.observe(question_set)
  (place,) = interventions.places(question_set, 3, 2)
  found, notes = interventions.patch(
    model,
    question_set,
    observed,
    place,
    np.full_like(examples.make_table(), -1),
    NUM_ENTITIES,
  )
  assert found == []
  assert len(notes) == 3
  assert notes[0].startswith("patching of train_3 after loop 2 is skipped")
