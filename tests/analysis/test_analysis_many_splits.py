"""Figures of a task with many splits are legible."""

import numpy as np
import pytest

from loopjax.analysis import depth
from loopjax.analysis.plots import curves

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
