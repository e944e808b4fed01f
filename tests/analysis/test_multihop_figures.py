"""Figures show the given rows, each number in its place."""

import multihop_examples as examples
import numpy as np
import pytest

from loopjax.analysis.multihop import (
  figures,
  instrumented,
  interventions,
  readings,
  rows,
)

pytestmark = pytest.mark.usefixtures("sketches")


def panels(figure):
  """Visible axes by title."""
  return {
    axes.get_title(loc="left"): axes
    for axes in figure.axes
    if axes.get_visible() and axes.get_title(loc="left")
  }


def metrics_row(step, split, stages):
  values = {f"stage{k}_accuracy": v for k, v in enumerate(stages, start=1)}
  return {"step": step, "split": split, **values}


def test_stages_over_training(drawn, tmp_path):
  metrics = [
    metrics_row(10, "train_2", (0.9, 1.0)),
    {"step": 10, "split": "train", "loss": 1.0},
    metrics_row(10, "test_id_2", (0.1, 0.2)),
    metrics_row(20, "train_2", (0.3, 1.0)),
  ]
  splits = ("train_2", "test_id_2", "test_ood_2")
  assert figures.draw_stages(metrics[1:2], splits, 2, tmp_path) == []
  (path,) = figures.draw_stages(metrics, splits, 2, tmp_path)
  shown = panels(drawn[path.name])
  assert list(shown) == ["train_2", "test_id_2"]
  first, second = shown["train_2"].get_lines()
  assert first.get_label() == "after loop 1"
  assert first.get_xydata().tolist() == [[10, 0.9], [20, 0.3]]
  assert second.get_xydata().tolist() == [[10, 1.0], [20, 1.0]]
  assert shown["train_2"].get_xlabel() == "optimizer steps"
  assert shown["train_2"].get_ylabel() == "accuracy"


def test_readings(drawn, tmp_path):
  question_set = examples.make_questions()
  observed = examples.instrument().observe(question_set)
  lens = readings.logit_lens(question_set, observed)
  cosines = readings.cosines(question_set, observed)
  role_exposure = readings.role_exposure(question_set, observed)
  figures.draw_lens(lens, tmp_path)
  shown = panels(drawn["lens.png"])
  assert len(shown) == 3 * (2 + 3)  # Entities of train, test_id and test_ood.
  values = shown["test_ood_3, bridge2"].images[0].get_array()
  assert values.shape == (3, 4)
  for row in rows.select(lens, "lens", split="test_ood_3", entity="bridge2"):
    cell = values[row["loop"] - 1, row["position"]]
    assert cell == pytest.approx(row["probability"])
  axes = shown["test_ood_3, bridge2"]
  written = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
  for place, value in np.ndenumerate(values):
    assert written[place] == f"{value:.2f}".removeprefix("0")
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["1", "2", "3"]  # Loops.
  figures.draw_cosines(cosines, tmp_path)
  shown = panels(drawn["cosines.png"])
  assert list(shown) == [
    f"bridge{k}, loop {k}: {state}"
    for k in (1, 2)
    for state in ("H", "H, centred")
  ]
  bars = shown["bridge2, loop 2: H"].containers
  bars = [each for each in bars if each.get_label() == "the bridge"]
  heights = [bar.get_height() for bar in bars[0]]
  np.testing.assert_allclose(heights, 1 / (1 + 0.05**2), rtol=1e-6)
  figures.draw_role_exposure(role_exposure, tmp_path)
  shown = panels(drawn["role_exposure.png"])
  assert list(shown) == ["test_id_2", "test_id_3"]
  labels = [text.get_text() for text in shown["test_id_2"].get_xticklabels()]
  counts = rows.select(
    role_exposure, "role_exposure", split="test_id_2", loop=3
  )
  assert labels == [
    f"{row['role_exposure']}\nn={row['count']}" for row in counts
  ]


def test_effects(drawn, tmp_path):
  question_set = examples.make_questions()
  model = examples.instrument(strength=0.1)
  observed = model.observe(question_set)
  (place,) = interventions.places(question_set, 3, 2)
  found = interventions.sweep(model, question_set, observed, place)
  figures.draw_interventions(found, tmp_path)
  shown = panels(drawn["intervention_loop2.png"])
  assert len(shown) == len(instrumented.NORMS) * len(interventions.TARGETS)
  line = rows.select(
    found, "intervention", split="train_3", norm="rms", target="bridge"
  )
  wanted = [[row["alpha"], row["accuracy"]] for row in line]
  containers = shown["true bridge, RMS norm"].containers
  data = {each.get_label(): each[0].get_xydata() for each in containers}
  assert data["train_3"].tolist() == wanted
  assert list(data) == ["train_3", "test_id_3", "test_ood_3"]
  bars = {each.get_label(): each[2][0].get_segments() for each in containers}
  for row, bar in zip(line, bars["train_3"], strict=True):
    low, high = row["accuracy"] + row["accuracy/standard_error"] * np.array(
      [-1, 1]
    )
    np.testing.assert_allclose(bar, [[row["alpha"], low], [row["alpha"], high]])
  model = examples.instrument()
  observed = model.observe(question_set)
  patched, _ = interventions.patch(
    model,
    question_set,
    observed,
    place,
    examples.make_table(),
    2 * examples.CONFIG.num_entities,
  )
  figures.draw_patching(patched, tmp_path)
  shown = panels(drawn["patching.png"])
  assert len(shown) == 2
  for title, implied in (
    ("position 2", 1),
    ("position 0 (control)", 0),
  ):
    bars = {
      each.get_label(): [bar.get_height() for bar in each]
      for each in shown[f"After loop 2, {title}"].containers
      if each.get_label() and hasattr(each, "datavalues")
    }
    assert bars["changes to the implied answer"] == 3 * [implied]
    assert bars["is unchanged"] == 3 * [1 - implied]
