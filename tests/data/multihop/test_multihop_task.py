"""The multi-hop task's batches and scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_examples import read

from loopjax.data.multihop import language, task
from loopjax.types import Output

FORMATS = sorted(language.FORMATS)
SMALL = task.Config(
  num_entities=20,
  num_relations=8,
  out_degree=4,
  num_train_chains=(60, 40),
  num_test_chains=(100, 80),
  num_scored_train=30,
)


def changed(**values):
  return dataclasses.replace(SMALL, **values)


def whole(config, split, num=None, **kwargs):
  """The dataset and all its examples (of `num` batches), one after another."""
  dataset, batches = read(
    task, config, split, num, **{"batch_size": 32, **kwargs}
  )
  joined = {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}
  if split != "train":
    valid = joined.pop("valid")
    joined = {name: value[valid] for name, value in joined.items()}
  return dataset, joined


@functools.cache
def known(config):
  """Entities and relations by word, and tails by entity and relation."""
  facts, _ = task._splits(config)
  entity_of = {task.decode(config, [i]): i for i in range(2 * 20)}
  relation_of = {task.decode(config, [40 + i]): i for i in range(8)}
  edges = {
    (head, relation): tail
    for head, relation, tail in zip(
      facts.heads.tolist(),
      facts.relations.tolist(),
      facts.tails.tolist(),
      strict=True,
    )
  }
  assert len(edges) == facts.num_facts
  assert config.vocabulary.num_entities == 40
  return entity_of, relation_of, edges


def walk(config, text):
  """Entities after every hop, from the text of a question alone."""
  entity_of, relation_of, edges = known(config)
  words = text.split(" ")
  (entity,) = (entity_of[word] for word in words if word in entity_of)
  relations = [relation_of[word] for word in words if word in relation_of]
  if words[0] == "Who":
    relations.reverse()
  path = [entity]
  for relation in relations:
    path.append(edges[path[-1], relation])
  return path


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_example_says_what_the_graph_says(format, split):
  config = changed(format=format)
  num = 9 if split == "train" else None  # 260 examples are an epoch.
  dataset, got = whole(config, split, num)
  names = dataset.groups["split"]
  for row in range(len(got["inputs"])):
    path = walk(config, task.decode(config, got["inputs"][row]))
    hops = len(path) - 1
    (last,) = np.flatnonzero(got["weights"][row])
    assert got["weights"][row, last] == 1
    assert got["targets"][row, last] == path[-1]
    # The answer is predicted at the last real token; padding follows.
    real = got["inputs"][row] < config.vocabulary.padding
    np.testing.assert_array_equal(real, np.arange(len(real)) <= last)
    assert (got["targets"][row][got["weights"][row] == 0] == 0).all()
    if split == "train":
      assert hops == 1 or path[0] < 20  # Chains belong to graph A.
      continue
    bridges = [-1, *path[1:]]
    bridges += [-1] * (config.sequence_length - len(bridges))
    assert got["bridges"][row].tolist() == bridges
    name = names[got["group/split"][row]]
    assert name.endswith("_atom" if hops == 1 else f"_{hops}")
    if "_atom" not in name:
      assert (path[0] >= 20) == ("_ood_" in name)


def test_training_sees_every_training_example_in_an_epoch_and_no_other():
  dataset, got = whole(SMALL, "train", 13, batch_size=20)
  assert dataset.facts["train_examples"] == 260
  rows = {tuple(row) for row in got["inputs"].tolist()}
  assert len(rows) == 260
  hops = np.argmax(got["weights"], axis=1)
  assert np.bincount(hops).tolist() == [0, 160, 60, 40]
  _, scored = whole(SMALL, "test")
  for name, row in zip(
    scored["group/split"], scored["inputs"].tolist(), strict=True
  ):
    assert (tuple(row) in rows) == (name < 3)


def test_an_epoch_has_single_facts_as_often_as_asked():
  config = dataclasses.replace(SMALL, num_fact_repeats=3)
  num_batches = (3 * 160 + 100) // 20
  dataset, got = whole(config, "train", num_batches, batch_size=20)
  assert dataset.facts["train_examples"] == 260  # Distinct ones.
  rows, counts = np.unique(got["inputs"], axis=0, return_counts=True)
  is_fact = (rows[:, 2] == config.vocabulary.padding) & (counts > 0)
  assert len(rows) == 260 and is_fact.sum() == 160
  assert (counts[is_fact] == 3).all() and (counts[~is_fact] == 1).all()


def test_evaluation_holds_all_splits_and_who_is_in_which():
  dataset, got = whole(SMALL, "test")
  names, roles = dataset.groups["split"], dataset.groups["role_exposure"]
  counts = np.bincount(got["group/split"], minlength=len(names))
  assert dict(zip(names, counts.tolist(), strict=True)) == {
    "train_atom": 30, "train_2": 30, "train_3": 30, "validation_id_2": 100,
    "validation_id_3": 80, "validation_ood_2": 100, "validation_ood_3": 80,
    "test_id_2": 100, "test_id_3": 80, "test_ood_2": 100, "test_ood_3": 80,
  }  # fmt: skip
  for split, role_exposure in zip(
    got["group/split"], got["group/role_exposure"], strict=True
  ):
    name = names[split]
    if "_id_" in name:
      assert roles[role_exposure].split("/")[0] == name
    else:
      assert role_exposure == -1
  # Examples without a group are in no sum.
  sums = jax.ops.segment_sum(
    jnp.ones(len(got["group/role_exposure"])),
    got["group/role_exposure"],
    len(roles),
  )
  assert sums.sum() == 2 * 180
  expected = np.bincount(
    got["group/role_exposure"] + 1, minlength=len(roles) + 1
  )
  np.testing.assert_array_equal(sums, expected[1:])


def test_any_prefix_of_the_evaluation_split_is_a_fair_sample():
  _, got = whole(SMALL, "test")
  assert set(got["group/split"][:128].tolist()) == set(range(11))


def test_validation_sees_no_test_chain():
  dataset, got = whole(SMALL, "validation")
  names = {dataset.groups["split"][i] for i in got["group/split"]}
  assert not any(name.startswith("test") for name in names)
  assert {
    "train_atom",
    "train_2",
    "validation_id_2",
    "validation_ood_3",
  } <= names


def test_formats_ask_the_same_questions():
  digests, answers = set(), []
  for format in FORMATS:
    dataset, got = whole(changed(format=format), "test")
    digests.add(dataset.facts["split_sha256"])
    answers.append(got["bridges"][:, :4])
  assert len(digests) == 1
  np.testing.assert_array_equal(answers[0], answers[1])
  np.testing.assert_array_equal(answers[0], answers[2])


def test_the_runs_seed_orders_and_the_tasks_seeds_choose():
  def facts(split="test", seed=0, **values):
    return whole(changed(**values), split, 2, seed=seed)

  dataset, first = facts("train")
  again, second = facts("train", seed=1)
  assert dataset.facts == again.facts
  assert not np.array_equal(first["inputs"], second["inputs"])
  _, scored = facts()
  np.testing.assert_array_equal(scored["inputs"], facts(seed=1)[1]["inputs"])
  digests = {
    facts(**values)[0].facts["split_sha256"]
    for values in ({}, {"graph_seed": 1}, {"split_seed": 1})
  }
  assert len(digests) == 3
  graph = task._splits(SMALL)[0]
  same, other = (
    task._splits(changed(**values))[0]
    for values in ({"split_seed": 1}, {"graph_seed": 1})
  )
  np.testing.assert_array_equal(graph.tails, same.tails)
  assert not np.array_equal(graph.tails, other.tails)


def test_the_papers_data_stays():
  """A different number means different data: results are not comparable."""
  dataset = task.make_dataset(task.Config(), "train", batch_size=500, seed=0)
  assert dataset.facts == {
    "train_examples": 20_000,
    "train_atom_size": 10_000,
    "train_2_size": 10_000,
    "validation_id_2_size": 2_000,
    "validation_ood_2_size": 2_000,
    "test_id_2_size": 2_000,
    "test_ood_2_size": 2_000,
    "split_sha256": (
      "44b9b2b7cceaa8f9140109dc7e3fce6102fa32c710dd3e7dd4febe46384d58b4"
    ),
  }


def test_scores_after_every_loop():
  """A model that follows one relation per loop."""
  dataset, batch = whole(SMALL, "test")
  bridges = batch["bridges"]
  hops = (bridges >= 0).sum(axis=1)
  loops = np.arange(1, 4)[:, None, None]
  reached = np.minimum(loops, np.arange(4))  # Position j knows r1 .. rj.
  path = np.concatenate([batch["inputs"][:, :1], bridges[:, 1:]], axis=1)
  predictions = path[np.arange(len(path))[None, :, None], reached]
  logits = 40.0 * jax.nn.one_hot(predictions[-1], 49)
  output = Output(logits, {}, {}, {}, {"prediction": jnp.array(predictions)})
  scores = task.score(output, batch)
  assert sorted(scores) == [
    "accuracy", "loss", "stage1_accuracy", "stage2_accuracy", "stage3_accuracy",
  ]  # fmt: skip
  assert all(value.dtype == jnp.float32 for value in scores.values())
  answers = path[np.arange(len(path)), hops]
  for loop in (1, 2, 3):
    there = path[np.arange(len(path)), np.minimum(hops, loop)]
    got = np.asarray(scores[f"stage{loop}_accuracy"])
    np.testing.assert_array_equal(got, there == answers)
    assert (got[hops <= loop] == 1).all()
    assert loop == 3 or got[hops > loop].mean() < 0.3
  np.testing.assert_array_equal(scores["accuracy"], 1)
  np.testing.assert_allclose(scores["loss"], 0, atol=1e-5)


def test_scores_of_hand_made_answers():
  """Only the logits at the last token of the question count."""
  batch = {
    "targets": jnp.array([[5, 2, 5], [5, 5, 3], [5, 2, 5]]),
    "weights": jnp.array([[0.0, 1, 0], [0, 0, 1], [0, 1, 0]]),
  }
  answers = jnp.array([[0, 2, 4], [5, 5, 3], [5, 1, 5]])
  logits = 10.0 * jax.nn.one_hot(answers, 6)
  scores = task.score(Output(logits, {}, {}, {}, {}), batch)
  assert sorted(scores) == ["accuracy", "loss"]
  assert scores["accuracy"].tolist() == [1, 1, 0]
  small = np.log1p(5 * np.exp(-10.0))
  np.testing.assert_allclose(
    scores["loss"], [small, small, 10 + small], rtol=1e-4
  )


def test_hop_positions_are_where_the_bridges_are():
  """In the symbolic format they are the indices of "bridges" themselves."""
  for hops in (1, 2, 3):
    assert task.hop_positions(SMALL, hops) == tuple(range(1, hops + 1))
  config = changed(format="direct")
  assert task.hop_positions(config, 2) == (2, 4)


def test_as_many_chains_as_there_are():
  assert task.Config(num_train_chains=(46_000,)).max_hops == 2
  deepest = task.Config(num_train_chains=(1,) * 15, num_test_chains=(1,) * 15)
  dataset = task.make_dataset(deepest, "test", batch_size=8, seed=0)
  assert dataset.groups["split"][-1] == "test_ood_16"
