"""Exits of looped models and MELT: by hand, against the model, and drawn."""

import functools
import json

import analysis_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.analysis import exits
from loopjax.losses import tokens as token_losses

LOOPS = 3


def evaluate_model(*arguments, family="looped", gate=50, **more):
  """As if its gate had learned to distinguish tokens."""

  def learned(params):
    if "exit_gate" in params:
      params["exit_gate"]["kernel"] *= gate

  return analysis_examples.evaluate(
    *arguments, family=family, change=learned, eval__depth_factor=0, **more
  )


def by_hand():
  """Two rows of two tokens; the last one does not count."""
  losses = np.array([
    [[3.0, 1.0], [2.0, 9.0]],
    [[2.0, 2.0], [2.0, 9.0]],
    [[1.0, 3.0], [2.0, 9.0]],
    [[9.0, 9.0], [9.0, 9.0]],
  ])  # fmt: skip
  # Cumulative exit probabilities: 1/2, 3/4; nearly all, none; none, 1/2.
  gates = np.array([
    [[0.0, 50.0], [-50.0, 0.0]],
    [[0.0, 0.0], [0.0, 0.0]],
    [[0.0, 0.0], [0.0, 0.0]],
  ])  # fmt: skip
  changes = np.array([
    [[1.0, 0.1], [0.5, 0.0]],
    [[0.3, 0.0], [0.5, 0.0]],
    [[0.2, 0.0], [0.5, 0.0]],
  ])  # fmt: skip
  weights = np.array([[1.0, 1.0], [1.0, 0.0]])
  return exits.ExitMeasurements(
    losses, gates.astype(np.float32), changes, weights
  )


@pytest.mark.parametrize(
  ("rule", "threshold", "expected"),
  [
    ("gate", 0.4, [[1, 1], [2, 1]]),
    ("gate", 0.7, [[2, 1], [3, 2]]),
    ("gate", 0.8, [[3, 1], [3, 3]]),
    ("gate", 1.0, [[3, 3], [3, 3]]),
    ("change", 0.7, [[2, 1], [3, 1]]),
    ("change", 0.4, [[2, 1], [1, 1]]),
    ("change", 1.0, [[3, 3], [3, 3]]),
  ],
)
def test_loops_that_tokens_run(rule, threshold, expected):
  steps = exits.exit_steps(by_hand(), LOOPS, rule, threshold)
  assert steps.tolist() == expected


def test_a_curve_is_loss_against_loops():
  found = by_hand()
  rows = {row["threshold"]: row for row in exits.curve(found, LOOPS, "gate")}
  assert rows[0.7]["loops"] == pytest.approx((2 + 1 + 3) / 3)
  assert rows[0.7]["loss"] == pytest.approx((2 + 1 + 2) / 3)
  # Differences from full depth: +1, -2 in one row, 0 in the other; mean -1/3.
  off = [(1 + 1 / 3 - 2 + 1 / 3) / 3, (0 + 1 / 3) / 3]
  assert rows[0.7]["error"] == pytest.approx(np.sqrt(2 / 1) * np.hypot(*off))
  assert (rows[1.0]["loops"], rows[1.0]["error"]) == (3, 0)
  assert rows[1.0]["loss"] == 2.0
  fixed = exits.curve(found, LOOPS, "fixed")
  assert [row["loops"] for row in fixed] == pytest.approx([1, 2, 3, 4])
  assert [row["loss"] for row in fixed] == pytest.approx([2, 2, 2, 9])


@pytest.mark.long
def test_what_is_measured_is_what_the_model_does(tmp_path):
  evaluated = evaluate_model(tmp_path, model__exit_gate="joint")
  found = exits.measure(evaluated, 18)  # In parts of different sizes.
  inputs, targets = (
    evaluated.batch["inputs"][:18],
    evaluated.batch["targets"][:18],
  )
  model = nnx.merge(evaluated.graphdef, evaluated.params)
  assert found.losses.shape == (2 * LOOPS, *inputs.shape)
  states = [model.embed(inputs, None)]
  for loops in (2, 2 * LOOPS):
    run = functools.partial(model, num_loops=loops, trace=("hidden",))
    output = jax.jit(run)(inputs)
    expected = token_losses.token_cross_entropy(
      output.logits, jnp.asarray(targets)
    )
    np.testing.assert_allclose(found.losses[loops - 1], expected, atol=1e-5)
  states += list(output.trace["hidden"])
  for loop in range(LOOPS):
    before, after = states[loop : loop + 2]
    np.testing.assert_allclose(
      found.gates[loop], model.exit_logits(after), atol=1e-4
    )
    change = np.linalg.norm(after - before, axis=-1)
    norm = np.linalg.norm(after, axis=-1)
    np.testing.assert_allclose(found.changes[loop], change / norm, atol=1e-5)
  np.testing.assert_array_equal(found.weights, evaluated.batch["weights"][:18])


@pytest.mark.long
def test_the_curve_is_drawn_with_its_numbers(tmp_path, drawn):
  evaluated = evaluate_model(tmp_path, model__exit_gate="joint")
  files = exits.draw_curve(evaluated)
  assert files == [tmp_path / "exit_curve.png", tmp_path / "exit_curve.json"]
  assert all(file.stat().st_size for file in files)
  numbers = json.loads(files[1].read_text())
  found = exits.measure(evaluated)
  assert numbers["gate"] == exits.curve(found, LOOPS, "gate")
  assert len(numbers["fixed"]) == 2 * LOOPS
  (axes,) = drawn["exit_curve.png"].axes
  assert axes.get_xlabel() == "loops per token"
  (mark,) = (line for line in axes.lines if line.get_linestyle() == ":")
  assert [*mark.get_xdata()] == [LOOPS] * 2
  lines = [each[0].get_xydata().tolist() for each in axes.containers]
  for rule in ("gate", "fixed"):
    wanted = [[row["loops"], row["loss"]] for row in numbers[rule]]
    assert wanted in lines, rule
  loops = [row["loops"] for row in numbers["gate"]]
  assert loops == sorted(loops)
  assert loops[0] < loops[-1] == pytest.approx(LOOPS)


@pytest.mark.parametrize("gate", ["none", "unused"])
def test_a_gate_that_was_not_trained_is_not_drawn(tmp_path, gate):
  evaluated = evaluate_model(tmp_path, model__exit_gate=gate)
  assert exits.draw_curve(evaluated) == []


evaluate_melt = functools.partial(evaluate_model, family="melt", gate=5)


@pytest.mark.long
def test_exits_are_measured_token_by_token(tmp_path, monkeypatch):
  monkeypatch.setattr(exits, "SKIPPING_THRESHOLDS", (0.3, 0.5, 1.0))
  evaluated = evaluate_melt(tmp_path)
  documents = np.repeat([[1, 2]], len(evaluated.batch["inputs"]), axis=0)
  documents = np.repeat(documents, (10, 6), axis=1)
  evaluated = evaluated._replace(
    batch={**evaluated.batch, "documents": documents}
  )
  found = exits.measure_skipping(evaluated)
  assert [row["rule"] for row in found[:: len(exits.SKIPPING_THRESHOLDS)]] == [
    "gate", "change",
  ]  # fmt: skip
  by_threshold = [row["loops"] for row in found if row["rule"] == "gate"]
  assert by_threshold == sorted(by_threshold, reverse=True)
  assert by_threshold[0] == pytest.approx(3) and by_threshold[-1] < 2.9
  model = nnx.merge(evaluated.graphdef, evaluated.params)
  logits = jax.jit(model)(evaluated.batch["inputs"]).logits
  losses = token_losses.token_cross_entropy(logits, evaluated.batch["targets"])
  for row in (found[0], found[len(exits.SKIPPING_THRESHOLDS)]):
    assert row["threshold"] == 1.0 and row["error"] == 0.0
    # Only the first document.
    assert row["loss"] == pytest.approx(float(losses[:, :10].mean()), rel=1e-4)
  assert found[-1]["loss"] != found[len(exits.SKIPPING_THRESHOLDS)]["loss"]
  files = exits.draw_skipping(evaluated, found)
  assert files == [tmp_path / "skipping.png", tmp_path / "skipping.json"]
  assert json.loads(files[1].read_text()) == {"exits": found}


def test_scores_are_the_fewest_loops_that_lose_little():
  rows = [(1.0, 3.0, 2.0), (0.9, 2.5, 2.01), (0.8, 2.0, 2.02), (0.7, 1.0, 2.03)]
  found = [
    {"rule": rule, "threshold": threshold, "loops": loops, "loss": loss}
    for rule in exits.RULES
    for threshold, loops, loss in rows
    if rule == "gate" or threshold == 1
  ]
  assert exits.skipping_scores(found) == {
    "loops_by_gate": 2.0,
    "loops_by_change": 3,
  }
  lost = [{**row, "loss": float("nan")} for row in found]
  assert exits.skipping_scores(lost) == {}


def test_melt_without_a_gate_has_no_exits(tmp_path):
  assert (
    exits.measure_skipping(evaluate_melt(tmp_path, model__exit_gate="none"))
    == []
  )
