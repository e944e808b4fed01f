"""Means, errors and counts over a whole split."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from tests_support import make_datasets, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data import pipeline
from loopjax.program import step as step_lib
from loopjax.train import evaluate


def test_scores_are_those_of_the_examples_one_by_one():
  """Padding of the last batch does not count; groups partition the split."""
  settings = config_lib.resolve(smoke(eval__batch_size=64))
  program = program_lib.make_program(settings, jax.devices()[:1])
  dataset = make_datasets(settings)["test"]
  num_examples = dataset.facts["test_examples"]
  assert num_examples % 64  # There is padding.

  def regrouped(batch):  # All of them are rated 0.
    return {**batch, "group/rating": batch["targets"][:, 0] % 3}

  batches = dataset.batches.map(regrouped)
  dataset = dataclasses.replace(dataset, batches=batches)
  params = program.init(jax.random.key(0)).params
  evaluator = evaluate.make_evaluator(program, {"test": dataset})
  got = evaluator(params, "test")["test"]

  model = nnx.merge(program.graphdef, params)
  values, ratings = [], []

  @jax.jit
  def score(batch):
    return settings.task_module.score(model(batch["inputs"]), batch)

  for batch in pipeline.iterate(dataset.batches, num_threads=0):
    accuracy = np.asarray(score(batch)["blank_accuracy"])
    values.append(accuracy[batch["valid"]])
    ratings.append(batch["group/rating"][batch["valid"]])
  values, ratings = np.concatenate(values), np.concatenate(ratings)
  assert got["count"] == len(values) == num_examples
  np.testing.assert_allclose(got["blank_accuracy"], values.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    got["blank_accuracy/standard_error"],
    values.std(ddof=1) / np.sqrt(len(values)),
    rtol=1e-5,
  )
  for rating, name in enumerate(("0", "1-2", "3-9")):
    group = values[ratings == rating]
    assert got[f"count/rating={name}"] == len(group) > 0
    np.testing.assert_allclose(
      got[f"blank_accuracy/rating={name}"], group.mean(), rtol=1e-5
    )


def rows_of(scores, **groups):
  """What `eval_step` returns of examples that all count."""
  num = len(next(iter(groups.values())))
  named = {f"group/{name}": np.array(ids) for name, ids in groups.items()}
  return {"valid": np.ones(num, bool), **named, "scores": scores}


def test_groups_that_are_splits_have_names_of_their_own():
  """Other groups may belong to one of these splits only."""
  right = np.float32([1, 1, 0, 0])
  rows = rows_of({"right": right}, split=[0, 0, 0, 1], kind=[0, 1, 1, 2])
  groups = {"split": ("near", "far"), "kind": ("near/old", "new/er", "far/x")}
  scores = evaluate.means(rows, groups, "test")
  assert set(scores) == {"test", "near", "far"}
  assert "right" not in scores["test"]  # A mean over splits is meaningless.
  assert scores["near"]["right"] == pytest.approx(2 / 3)
  assert scores["far"]["count"] == 1
  assert scores["near"]["right/kind=old"] == 1.0
  assert scores["test"]["right/kind=new/er"] == 0.5


@pytest.mark.long
def test_a_part_of_the_split_is_its_first_batches():
  settings = config_lib.resolve(smoke(eval__batch_size=64))
  program = program_lib.make_program(settings, jax.devices()[:1])
  evaluator = evaluate.make_evaluator(program, make_datasets(settings))
  params = program.init(jax.random.key(0)).params
  assert evaluator(params, "test", 100)["test"]["count"] == 128


def test_examples_that_count_differently():
  """A ratio of sums, and its error by the delta method."""
  rng = np.random.default_rng(0)
  values, weights = rng.normal(5, 1, 40), rng.uniform(1, 9, 40)
  rows = rows_of({"bits": (values, weights)}, half=[0] * 40)
  got = evaluate.means(rows, {}, "test")["test"]
  mean = np.average(values, weights=weights)
  assert got["bits"] == pytest.approx(mean)
  squares = 40 / 39 * np.sum((weights * (values - mean)) ** 2)
  assert got["bits/standard_error"] == pytest.approx(
    np.sqrt(squares) / weights.sum()
  )


@pytest.mark.parametrize("spread", [4e-4, 4e-5, 4e-6])
def test_the_error_of_scores_that_hardly_differ(spread):
  """Sums of squares in float32 gave 44 % too much, then 0."""
  rng = np.random.default_rng(0)
  values = np.float32(3.4 * (1 + spread * rng.normal(size=2000)))
  ids = np.arange(2000) % 2
  rows = rows_of({"loss": values}, half=ids)
  got = evaluate.means(rows, {"half": ("even", "odd")}, "test")["test"]
  for suffix, part in (
    ("", values), ("/half=even", values[::2]), ("/half=odd", values[1::2]),
  ):  # fmt: skip
    wanted = part.astype(np.float64).std(ddof=1) / np.sqrt(len(part))
    assert got[f"loss{suffix}/standard_error"] == pytest.approx(wanted)


def test_the_error_of_two_examples_and_of_one():
  rows = rows_of({"right": np.float32([1, 0, 1])}, kind=[0, 0, 1])
  got = evaluate.means(rows, {"kind": ("two", "one")}, "test")["test"]
  assert got["right/kind=two/standard_error"] == pytest.approx(0.5)
  assert got["right/kind=one"] == 1.0
  assert "right/kind=one/standard_error" not in got


@pytest.mark.long
def test_scores_with_weights_are_ratios_of_sums():
  """Over valid examples, for each group."""
  settings = config_lib.resolve(smoke(eval__batch_size=64))
  program = program_lib.make_program(settings, jax.devices()[:1])
  dataset = make_datasets(settings)["test"]
  batch = next(pipeline.iterate(dataset.batches, num_threads=0))
  rng = np.random.default_rng(0)
  values = rng.normal(5, 1, 64).astype(np.float32)
  weights = rng.uniform(1, 9, 64).astype(np.float32)
  valid, group = np.arange(64) < 50, np.arange(64) % 2
  rows = step_lib.eval_step(
    program.init(jax.random.key(0)).params,
    {**batch, "valid": valid, "group/half": group},
    graphdef=program.graphdef,
    score=lambda *_: {"bits": (values, weights)},
    num_loops=1,
    execution="scan",
  )
  rows = jax.tree.map(np.asarray, rows)
  got = evaluate.means(rows, {"half": ("even", "odd")}, "test")["test"]
  for suffix, chosen in (
    ("", valid),
    ("/half=even", valid & (group == 0)),
    ("/half=odd", valid & (group == 1)),
  ):
    expected = np.average(values[chosen], weights=weights[chosen])
    assert got[f"bits{suffix}"] == pytest.approx(expected, rel=1e-5)


def test_a_score_without_weight_has_no_mean():
  """It would be 0, the best of losses."""
  losses = np.float32([0, 0, 2, 2, 2]), np.float32([0, 0, 1, 1, 1])
  rows = rows_of({"loss": losses}, kind=[0, 0, 1, 1, 1])
  scores = evaluate.means(rows, {"kind": ("old", "new")}, "test")["test"]
  assert scores["count/kind=old"] == 2
  assert "loss/kind=old" not in scores
  assert scores["loss/kind=new"] == 2
  assert scores["loss/kind=new/standard_error"] == 0
