"""The lens against numbers by hand, and results on a known model."""

import dataclasses
import math

import jax.numpy as jnp
import multihop_examples as examples
import numpy as np
import pytest

from loopjax.analysis.multihop import instrumented, readings, rows
from loopjax.analysis.multihop.questions import entity_name
from loopjax.data.multihop import language, task


@pytest.mark.long
def test_a_distribution_by_hand():
  """Probabilities 1/2, 1/4, 1/8, 1/8; the logits have an added constant."""
  logits = jnp.log(jnp.array([4.0, 2.0, 1.0, 1.0]))
  got = instrumented.read_out(logits, jnp.arange(4))
  np.testing.assert_allclose(
    got["probability"], [0.5, 0.25, 0.125, 0.125], rtol=1e-6
  )
  assert got["rank"].tolist() == [1, 2, 3, 4]  # Ties: the first.
  np.testing.assert_allclose(
    got["reciprocal_rank"], [1, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6
  )
  margins = np.log([2, 1 / 2, 1 / 4, 1 / 4])
  np.testing.assert_allclose(got["margin"], margins, rtol=1e-6)
  np.testing.assert_allclose(got["entropy"], 1.75 * math.log(2), rtol=1e-6)


@pytest.mark.long
def test_many_distributions_with_ties_and_padding():
  rng = np.random.default_rng(0)
  logits = rng.integers(-2, 3, (3, 4, 9)).astype(np.float32)
  logits[..., 7:] = -1e9
  tokens = rng.integers(0, 7, (3, 4, 5))
  got = instrumented.read_out(jnp.asarray(logits), jnp.asarray(tokens))
  for i, j, n in np.ndindex(tokens.shape):
    row, token = logits[i, j, :7].astype(np.float64), tokens[i, j, n]
    chances = np.exp(row) / np.exp(row).sum()
    order = sorted(range(7), key=lambda v: (-row[v], v))
    expected = {
      "probability": chances[token],
      "rank": 1 + order.index(token),
      "reciprocal_rank": 1 / (1 + order.index(token)),
      "margin": row[token] - np.delete(row, token).max(),
      "entropy": -(chances * np.log(chances)).sum(),
    }
    for name, value in expected.items():
      assert got[name][i, j, n] == pytest.approx(value, rel=1e-5), name
  is_argmax = tokens == logits.argmax(-1)[..., None]
  assert np.array_equal(got["rank"] == 1, is_argmax)


def test_the_first_loop_is_counted_once():
  said = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
  first = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
  assert readings.first_loops(said).astype(int).tolist() == first


def test_cosines_by_hand():
  """Both are centred on the same vector, the mean of the real rows."""
  table = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [9.0, -9.0]])
  centre = instrumented.mean_embedding(table, 1)
  np.testing.assert_allclose(centre, [1.0, 1.0])
  state = jnp.array([2.0, 1.0])
  got = instrumented.cosines_of(state, table[:3], centre)
  root = math.sqrt(5)
  np.testing.assert_allclose(
    got["cosine"], [2 / root, 1 / root, 6 / (root * math.sqrt(8))], rtol=1e-6
  )
  # (1, 0) against (0, -1), (-1, 0), (1, 1).
  np.testing.assert_allclose(
    got["centred_cosine"], [0, -1, math.sqrt(0.5)], atol=1e-6
  )
  of_zeros = instrumented.cosines_of(jnp.zeros(2), table[:3], centre)
  assert of_zeros["cosine"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("format", sorted(language.FORMATS))
def test_questions_say_what_their_text_says(format):
  config = dataclasses.replace(examples.CONFIG, format=format)
  question_set = examples.make_questions(config)
  table, vocabulary = examples.make_table(config), config.vocabulary
  assert len(question_set.hops) == 72 + 30 + 20 + 2 * (25 + 15)
  for row in range(len(question_set.hops)):
    hops = question_set.hops[row]
    entity, relations = (
      question_set.entities[row, 0],
      question_set.relations[row, :hops],
    )
    written = language.questions(
      vocabulary, np.array([entity]), relations[None] - vocabulary.num_entities
    )
    assert (
      question_set.inputs[row, : written.shape[1]].tolist()
      == written[0].tolist()
    )
    assert question_set.last[row] == written.shape[1] - 1
    path = [entity]
    for relation in relations - vocabulary.num_entities:
      path.append(table[path[-1], relation])
    padding = [-1] * (config.max_hops - hops)
    assert question_set.entities[row].tolist() == [*path, *padding]
    assert question_set.answers[row] == path[-1]
    places = task.hop_positions(config, int(hops))
    assert question_set.hop_positions[row].tolist() == [*places, *padding]
    random_entity = question_set.random_entity[row]
    assert random_entity not in path
    assert random_entity // config.num_entities == entity // config.num_entities
  assert len(set(question_set.random_entity.tolist())) > 20
  splits = {
    name: (hops, len(found)) for name, hops, found in question_set.by_split()
  }
  assert splits["train_atom"] == (1, 72)
  assert splits["test_ood_3"] == (3, 15)


def test_a_random_entity_in_a_graph_without_others():
  config = dataclasses.replace(
    examples.CONFIG, num_entities=1, num_train_chains=(3,), num_test_chains=(2,)
  )
  question_set = examples.make_questions(config)
  assert np.array_equal(question_set.random_entity, question_set.entities[:, 0])


def test_a_model_that_composes_shows_each_bridge_at_its_place():
  question_set = examples.make_questions()
  observed = examples.instrument().observe(question_set)
  stages = readings.stages(question_set, observed)
  for row in stages:
    hops = {"atom": 1, "2": 2, "3": 3}[row["split"].rpartition("_")[2]]
    assert row["position"] == hops
    assert (
      row["accuracy"] > 0.99 if row["loop"] >= hops else (row["accuracy"] < 0.3)
    )
  found = readings.logit_lens(question_set, observed)
  for row in found:
    if not row["split"].endswith("_3"):
      continue
    hop = {"bridge1": 1, "bridge2": 2, "answer": 3}[row["entity"]]
    assert row["hop_position"] == hop
    there = row["position"] == hop and row["loop"] >= hop
    assert (row["argmax"] == 1) == there
    assert (row["rank"] == 1) == there
    if row["position"] == hop:
      assert row["first_argmax"] == (row["loop"] == hop)
  # One row per entity, loop and position of every split.
  assert len(found) == 3 * (2 + 3 * 2 * 3 + 3 * 3 * 4)


def test_cosines_of_a_model_that_composes():
  """H is (1, 0.05) at the bridge and at r1; W[r1] shares its second half."""
  question_set = examples.make_questions()
  observed = examples.instrument().observe(question_set)
  found = readings.cosines(question_set, observed)
  square = 1 + 0.05**2
  here = {"split": "test_id_2", "loop": 1, "position": 1}
  number = question_set.splits.index("test_id_2")
  first, second = question_set.relations[question_set.split == number, :2].T
  expected = {
    "bridge1": 1 / square,
    "relation1": 0.05**2 / square,
    "relation2": 0.05**2 / square * np.mean(first == second),
    "random_entity": 0.0,
  }
  for entity, value in expected.items():
    (row,) = rows.select(found, "cosine", entity=entity, **here)
    assert row["cosine"] == pytest.approx(value, abs=1e-6), entity
    assert "mixed_cosine" not in row
  (start,) = rows.select(
    found, "cosine", entity="start", **{**here, "position": 0}
  )
  assert start["cosine"] == pytest.approx(1.0)
  assert "hop_position" not in start
  entities = rows.values_of(
    rows.select(found, "cosine", split="train_atom"), "entity"
  )
  assert entities == ["answer", "start", "relation1", "random_entity"]


def test_role_exposure_splits_the_accuracy_of_test_id():
  question_set = examples.make_questions()
  observed = examples.instrument(num_loops=2).observe(question_set)
  by_group = readings.role_exposure(question_set, observed)
  assert {row["split"] for row in by_group} == {"test_id_2", "test_id_3"}
  for whole in readings.stages(question_set, observed):
    parts = rows.select(
      by_group, "role_exposure", split=whole["split"], loop=whole["loop"]
    )
    if parts:
      assert sum(row["count"] for row in parts) == whole["count"]
      right = sum(row["count"] * row["accuracy"] for row in parts)
      assert right == pytest.approx(whole["count"] * whole["accuracy"])
  names = {row["role_exposure"] for row in by_group}
  assert names <= {"both", "first", "second", "none", "all", "some"}


def test_rows_hold_means_and_their_errors():
  row = rows.make("a", "b", 1, 2, {"x": np.array([0, 0, 1, 1])}, entity="c")
  assert row == {
    "analysis": "a", "split": "b", "entity": "c", "loop": 1, "position": 2,
    "count": 4, "x": 0.5, "x/standard_error": pytest.approx(0.5 / 3**0.5),
  }  # fmt: skip
  one = rows.make("a", "b", 1, 2, {"x": np.array([1])})
  assert one["x"] == 1 and "x/standard_error" not in one
  assert entity_name(1, 2) == "bridge1"
  assert entity_name(2, 2) == "answer"
