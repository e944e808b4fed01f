"""Loops that MELT never runs: against the model, and figures."""

import functools
import json

import analysis_examples
import jax
import numpy as np
import pytest
from flax import nnx

from loopjax.analysis.loops import skipping
from loopjax.losses import tokens as token_losses


def learned(params):
  """As if its gate had learned to distinguish tokens."""
  if "exit_gate" in params:
    params["exit_gate"]["kernel"] *= 5


evaluate_model = functools.partial(
  analysis_examples.evaluate, family="melt", change=learned,
  eval__depth_factor=0,
)  # fmt: skip


@pytest.mark.long
def test_exits_are_measured_token_by_token(tmp_path, monkeypatch):
  monkeypatch.setattr(skipping, "THRESHOLDS", (0.3, 0.5, 1.0))
  evaluated = evaluate_model(tmp_path)
  documents = np.repeat([[1, 2]], len(evaluated.batch["inputs"]), axis=0)
  documents = np.repeat(documents, (10, 6), axis=1)
  evaluated = evaluated._replace(
    batch={**evaluated.batch, "documents": documents}
  )
  found = skipping.measure(evaluated)
  assert [row["rule"] for row in found[:: len(skipping.THRESHOLDS)]] == [
    "gate", "change",
  ]  # fmt: skip
  by_threshold = [row["loops"] for row in found if row["rule"] == "gate"]
  assert by_threshold == sorted(by_threshold, reverse=True)
  assert by_threshold[0] == pytest.approx(3) and by_threshold[-1] < 2.9
  model = nnx.merge(evaluated.graphdef, evaluated.params)
  logits = jax.jit(model)(evaluated.batch["inputs"]).logits
  losses = token_losses.token_cross_entropy(logits, evaluated.batch["targets"])
  for row in (found[0], found[len(skipping.THRESHOLDS)]):
    assert row["threshold"] == 1.0 and row["error"] == 0.0
    # Only the first document.
    assert row["loss"] == pytest.approx(float(losses[:, :10].mean()), rel=1e-4)
  assert found[-1]["loss"] != found[len(skipping.THRESHOLDS)]["loss"]
  files = skipping.draw_curve(evaluated, found)
  assert files == [tmp_path / "skipping.png", tmp_path / "skipping.json"]
  assert json.loads(files[1].read_text()) == {"exits": found}


def test_scores_are_the_fewest_loops_that_lose_little():
  rows = [(1.0, 3.0, 2.0), (0.9, 2.5, 2.01), (0.8, 2.0, 2.02), (0.7, 1.0, 2.03)]
  found = [
    {"rule": rule, "threshold": threshold, "loops": loops, "loss": loss}
    for rule in skipping.RULES
    for threshold, loops, loss in rows
    if rule == "gate" or threshold == 1
  ]
  assert skipping.scores(found) == {"loops_by_gate": 2.0, "loops_by_change": 3}
  lost = [{**row, "loss": float("nan")} for row in found]
  assert skipping.scores(lost) == {}


def test_without_a_gate_nothing_is_measured(tmp_path):
  assert (
    skipping.measure(evaluate_model(tmp_path, model__exit_gate="none")) == []
  )
