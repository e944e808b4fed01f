"""Curves over training: of passes, groups, and tasks with many splits."""

import numpy as np
import pytest

from loopjax.analysis import depth
from loopjax.analysis.plots import curves


def row(step, num_passes=2, **more):
  values = {"step": step, "split": "train", **more}
  for n in range(num_passes):
    values[f"fast_weight_norm/loop={n}"] = step + n
    values[f"hidden_norm/loop={n}"] = 10 * step + n
    for layer in (0, 1):
      values[f"retention/memory={layer}/loop={n}"] = 0.1 * layer + 0.2 * n
  return values


def lines(axes):
  return {line.get_label(): line.get_ydata().tolist() for line in axes.lines}


def test_every_pass_and_every_memory_layer_has_its_line(tmp_path, drawn):
  (path,) = curves.draw_passes([row(1), row(2)], tmp_path)
  assert path.exists()
  fast, hidden, retention = drawn["passes.png"].axes
  assert lines(fast) == {"pass 1": [1, 2], "pass 2": [2, 3]}
  assert lines(hidden) == {"pass 1": [10, 20], "pass 2": [11, 21]}
  assert lines(retention) == {  # Means over two passes.
    "memory layer 1": pytest.approx([0.1, 0.1]),
    "memory layer 2": pytest.approx([0.2, 0.2]),
  }


def test_nothing_is_drawn_of_other_models(tmp_path):
  assert curves.draw_passes([{"step": 1, "split": "train"}], tmp_path) == []


def test_bits_and_nats_share_no_axis(tmp_path, drawn):
  """A share has all of 0 to 1; bits per byte may have a decade."""
  rows = [
    {"step": step, "split": "validation", "loss": 1.0, "bits_per_byte": bits}
    for step, bits in ((1, 8.0), (2, 0.5))
  ]
  curves.draw_training(rows, ("bits_per_byte", "loss"), 2, tmp_path)
  panels = {axes.get_title("left"): axes for axes in drawn["curves.png"].axes}
  scores = panels["Scores of the validation split"]
  assert lines(scores) == {"bits per byte": [8.0, 0.5]}
  assert scores.get_ylabel() == "bits per byte"
  assert scores.get_yscale() == "log"


def test_every_group_has_its_loss(tmp_path, drawn):
  rows = [
    {"step": step, "split": "validation", "loss": 1.0}
    | {f"loss/hops={k}": step * k for k in (1, 16)}
    | {"loss/hops=1/standard_error": 0.1, "accuracy/hops=1": 0.5}
    | {"count/hops=1": 1200}
    | {"loss/source=only": 1.0}
    for step in (1, 2)
  ]
  curves.draw_training(rows, ("accuracy",), 2, tmp_path)
  panels = {axes.get_title("left"): axes for axes in drawn["curves.png"].axes}
  hops = panels["Loss by hops (number of examples)"]
  assert lines(hops) == {"1 (1,200)": [1, 2], "16": [16, 32]}
  assert not any("source" in title for title in panels)  # It is one.


_SPLITS = (
  "train_atom",
  "train_2",
  "train_3",
  *(f"{of}_{kind}_{hops}" for of in ("validation", "test")
    for kind in ("id", "ood") for hops in range(2, 8)),
)  # fmt: skip


def panels(figure):
  return [axes for axes in figure.axes if axes.get_visible()]


def _names(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.long
def test_splits_that_differ_in_their_number_share_a_panel(drawn, tmp_path):
  scores = {}
  for index, split in enumerate(_SPLITS):
    for metric in ("accuracy", "loss"):
      scores[f"{split}/{metric}"] = np.linspace(0, index / 30, 9)
      scores[f"{split}/{metric}/standard_error"] = np.full(9, 0.01)
  depth.draw_depth(scores, ("accuracy",), 3, 4500, tmp_path)
  shown = panels(drawn["depth.png"])
  titles = [axes.get_title(loc="left") for axes in shown]
  answers, loss = "Accuracy after each loop", "Loss"
  assert titles == [
    f"{answers}, test id",
    f"{answers}, test ood",
    f"{loss}, test id",
    f"{loss}, test ood",
  ]
  assert len(_names(shown[0])) == 6
  assert all(name.startswith("test id") for name in _names(shown[0]))
  assert all(axes.get_position().height > 0.2 for axes in shown)


def test_few_splits_stay_together(drawn, tmp_path):
  scores = {}
  for split in ("train", "validation", "test"):
    scores[f"{split}/accuracy"] = np.linspace(0, 1, 4)
    scores[f"{split}/accuracy/standard_error"] = np.full(4, 0.01)
  depth.draw_depth(scores, ("accuracy",), 2, 10, tmp_path)
  (only,) = panels(drawn["depth.png"])
  assert len(_names(only)) == 3


def test_a_split_has_one_colour_in_validation_and_test(drawn, tmp_path):
  rows = [
    {"step": step, "split": split, "accuracy": 0.5}
    for step in (1, 2)
    for split in _SPLITS
  ]
  curves.draw_training(rows, ("accuracy",), 3, tmp_path)
  last = panels(drawn["curves.png"])[-1]
  lines = {line.get_label(): line for line in last.get_lines()}
  one, other = lines["validation ood 3"], lines["test ood 3"]
  assert one.get_color() == other.get_color()
  assert one.get_marker() != other.get_marker()
  assert one.get_color() != lines["test id 3"].get_color()
  assert last.get_position().height > 0.2
