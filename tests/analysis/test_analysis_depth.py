"""Accuracy by depth: known answers, and agreement with other code paths."""

import functools

import analysis_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests_support import crossing

from loopjax.analysis import depth
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.program import step


def _score(output, batch):
  right = (jnp.argmax(output.logits, -1) == batch["targets"]).astype(float)
  return {"right": jnp.mean(right, axis=1), "loss": jnp.zeros(len(right))}


def test_scores_of_known_predictions():
  batch = {"targets": np.array([[1, 2], [0, 2]])}
  prediction = np.array([[[0, 0], [0, 1]], [[1, 2], [0, 1]]])  # [K, B, T].
  found = depth.scores_by_loop(_score, prediction, batch, 3)
  scores = depth.means(found)
  assert scores.keys() == {"right", "right/standard_error"}
  np.testing.assert_allclose(scores["right"], [0.25, 0.75])
  # Values (0, 1/2) and (1, 1/2): of two, half of their difference.
  expected = [0.25] * 2
  np.testing.assert_allclose(scores["right/standard_error"], expected)


@pytest.mark.long
def test_every_entry_is_what_a_fixed_model_answers_at_that_depth(tmp_path):
  def sharpened(params):
    """Otherwise an untrained model's score hardly depends on depth."""
    params["head"]["kernel"] *= 8

  evaluated = analysis_examples.sampled(
    tmp_path, change=sharpened, model__halting="fixed"
  )
  scores = depth.scores_by_depth(evaluated)
  assert len(scores["exact_match"]) == 6
  assert len(set(scores["blank_accuracy"])) > 3
  model = nnx.merge(evaluated.graphdef, evaluated.params)
  task = evaluated.settings.task_module
  for loops in (2, 6):
    run = jax.jit(
      functools.partial(model, num_loops=loops, trace=("confidence",))
    )
    output = run(evaluated.batch["inputs"])
    chances = jax.nn.softmax(output.logits)
    np.testing.assert_allclose(
      output.trace["confidence"][-1], chances.max(axis=-1), rtol=1e-5
    )
    for name in ("exact_match", "blank_accuracy"):
      value = task.score(output, evaluated.batch)[name]
      np.testing.assert_allclose(
        scores[name][loops - 1], np.mean(value), atol=1e-6
      )


@pytest.mark.long
def test_chunks_do_not_change_what_is_shown(monkeypatch):
  # 19 examples in chunks of 8: the last chunk is filled up.
  monkeypatch.setattr(evaluated_lib, "_CHUNK", 8)
  settings = analysis_examples.make_settings()
  graphdef, params = analysis_examples.make_model(settings)
  batch = evaluated_lib.sample(analysis_examples.make_dataset(), 20)
  forward = evaluated_lib.make_forward(settings, graphdef, params, batch)
  names = ("prediction", "confidence", "weight", "attention")
  shown = forward(names, averaged=("attention",), num_loops=4, num_examples=19)
  model = nnx.merge(graphdef, params)
  whole = jax.jit(functools.partial(model, num_loops=4, trace=names))(
    batch["inputs"][:19]
  )
  expected = dict(whole.trace)
  expected["attention"] = expected["attention"].mean(axis=1)
  assert shown.trace.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(shown.trace[name], value, atol=1e-5)
  np.testing.assert_allclose(shown.logits, whole.logits, atol=1e-5)
  for name, value in whole.stats.items():
    np.testing.assert_allclose(shown.stats[name], value, atol=1e-5)


@pytest.mark.parametrize("num_examples", [0, 10, 20, 99])
def test_sample_is_the_first_examples_without_padding(num_examples):
  dataset = analysis_examples.make_dataset(20, 8)
  batch = evaluated_lib.sample(dataset, num_examples)
  rows = batch["row"]
  assert batch["valid"].all()
  assert rows.tolist() == list(range(20))[: num_examples or None]
  again = evaluated_lib.sample(dataset, num_examples)
  np.testing.assert_array_equal(again["row"], rows)


def test_every_split_has_a_depth_of_its_own(tmp_path):
  """The scores of a split depend on its examples only."""
  evaluated = analysis_examples.sampled(tmp_path)
  evaluated.batch["group/split"] = np.array([0, 2] * 10)
  evaluated = evaluated._replace(splits=("here", "nowhere", "there"))
  parts = depth.scores_by_depth(evaluated)
  whole = depth.scores_by_depth(evaluated._replace(splits=()))
  assert {name.partition("/")[0] for name in parts} == {"here", "there"}
  mean = (parts["here/blank_accuracy"] + parts["there/blank_accuracy"]) / 2
  np.testing.assert_allclose(mean, whole["blank_accuracy"], rtol=1e-6)
  difference = parts["here/blank_accuracy"] - parts["there/blank_accuracy"]
  assert np.abs(difference).max() > 1e-3


@pytest.mark.long
@crossing(
  ("family", "factor"),
  [("looped", 2), ("melt", 1), ("sleep", 2)],
  manual=(("sleep", 2),),
)
def test_scores_at_a_depth_are_those_of_an_evaluation(family, factor, tmp_path):
  """In one pass, or by separate runs with several numbers of loops."""
  evaluated = analysis_examples.sampled(
    tmp_path, family, eval__depth_factor=factor, eval__depth_examples=0,
    eval__batch_size=8,
  )._replace(forward=None)  # fmt: skip
  trained = evaluated.settings.model.num_loops
  most = factor * trained
  scores = depth.scores_by_depth(evaluated)
  rows = functools.partial(
    step.eval_step,
    evaluated.params,
    {name: jnp.asarray(x) for name, x in evaluated.batch.items()},
    graphdef=evaluated.graphdef,
    score=evaluated.settings.task_module.score,
    execution="scan",
  )
  ran = {1, 2, 4, trained, most}
  for loops in range(1, most + 1):
    if loops not in ran:
      assert np.isfinite(scores["loss"][loops - 1]) == (family == "looped")
      continue
    for name, value in rows(num_loops=loops)["scores"].items():
      if name in scores:
        values, weights = value if isinstance(value, tuple) else (value, None)
        np.testing.assert_allclose(
          scores[name][loops - 1], np.average(values, weights=weights),
          rtol=1e-5, atol=1e-7,
        )  # fmt: skip
  assert len(scores["loss"]) == most
  assert ("relative_change" in scores) == (family == "looped")


@pytest.mark.long
def test_rows_count_by_their_weight():
  values, weights = np.array([[1.0, 3.0, 9.0]]), np.array([[2.0, 1.0, 0.0]])
  found = depth.means({"bits": (values, weights)})
  np.testing.assert_allclose(found["bits"], [5 / 3])
  # Weighted deviations 2 * 2/3 and 4/3 of two rows, over the weights' sum.
  expected = np.sqrt(2 / (2 - 1) * 2) * (4 / 3) / 3
  np.testing.assert_allclose(found["bits/standard_error"], [expected])
  assert depth.means({"bits": (values, weights)}, []) == {}


def test_scores_stand_at_the_loops_that_ran(tmp_path, drawn):
  """With what the trained number of loops has, and the best one."""
  scores = {
    "exact_match": np.array([0.1, 0.4, 0.9, 0.7]),
    "exact_match/standard_error": np.full(4, 0.05),
    "loss": np.array([2.0, np.nan, 0.5, 1.0]),  # Two loops were not run.
    "loss/standard_error": np.full(4, 0.1),
  }
  depth.draw_depth(scores, ("exact_match",), 2, 64, tmp_path)
  figure = drawn["depth.png"]
  shares, losses = figure.axes
  best, line, trained = shares.get_lines()
  assert line.get_label() == "exact match: 0.400 after 2, best 0.900 after 3"
  assert line.get_xydata().tolist() == [[1, 0.1], [2, 0.4], [3, 0.9], [4, 0.7]]
  assert best.get_xydata().tolist() == [[3, 0.9]]
  assert list(trained.get_xdata()) == [2, 2]
  assert (shares.get_xlabel(), shares.get_ylabel()) == ("loops run", "share")
  line = losses.get_lines()[1]
  assert line.get_xydata().tolist() == [[1, 2.0], [3, 0.5], [4, 1.0]]
  assert figure.get_suptitle() == "64 examples, ±1 standard error"
