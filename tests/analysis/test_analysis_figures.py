"""Exactly the applicable figures are drawn."""

import json
import types

import analysis_examples
import matplotlib.image
import numpy as np
import pytest
from tests_support import crossing

from loopjax import train
from loopjax.analysis import depth, figures
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import sudoku as pictures
from loopjax.analysis.plots import draw, series
from loopjax.data.sudoku import board as board_lib
from loopjax.run import workdir as workdir_lib

pytestmark = pytest.mark.usefixtures("sketches")

_ALWAYS = {"attention", "attention_heads", "depth", "puzzle", "puzzle_failed"}
_HALTING = {"halting", "halting_map"}


def _write_metrics(workdir, num_loops=3):
  """A short metrics.jsonl like a run's."""
  rows = []
  for step in (10, 20):
    row = {"step": step, "split": "train", "loss": 2.0 / step}
    row |= {"ponder_steps": 2.5, "grad_norm": 0.5, "grad_norm/router": 0.1}
    for loop in range(num_loops):
      row[f"router_probability/loop={loop}"] = 0.1 * loop
      row[f"router_probability_std/loop={loop}"] = 0.05
      row[f"output_weight/loop={loop}"] = 1 / num_loops
    rows.append(row)
    evaluated = {"loss": 1.0, "exact_match": 0.5, "blank_accuracy": 0.8}
    rows.append({"step": step, "split": "validation", **evaluated})
  workdir_lib.write_json_lines(workdir / "metrics.jsonl", rows)


def _draw(workdir, family="utm", **overrides):
  settings = analysis_examples.make_settings(family, **overrides)
  graphdef, params = analysis_examples.make_model(settings)
  dataset = analysis_examples.make_dataset()
  rows = workdir_lib.read_metrics(workdir)
  program = types.SimpleNamespace(settings=settings, graphdef=graphdef)
  return figures.make_figures(
    train.Scored(program, params, {}, dataset, rows, workdir / "figures")
  )


def _check(workdir, result, names):
  """Exactly these figures exist and are not empty."""
  pictures_there = set((workdir / "figures").glob("*.png"))
  assert {path.stem for path in pictures_there} == names
  numbers = workdir / "figures" / "attention_heads.json"
  assert set(result.files) == pictures_there | {numbers}
  assert len(result.files) == len(names) + 1
  assert not result.failed
  for path in pictures_there:
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 200
    assert np.std(pixels[..., :3]) > 0.02, path


@pytest.mark.long
def test_all_pictures_of_a_model_that_halts(tmp_path):
  _write_metrics(tmp_path)
  result = _draw(tmp_path)
  _check(tmp_path, result, _ALWAYS | _HALTING | {"curves", "router"})
  assert {value.shape for value in result.scores["depth"].values()} == {(6,)}
  path = tmp_path / "figures" / "attention_heads.json"
  numbers = json.loads(path.read_text())
  assert [head["head"] for head in numbers["heads"]] == [0, 1]
  for head in numbers["heads"]:
    assert head["last"]["sm"] + head["last"]["ss"] == pytest.approx(1, abs=1e-3)
    assert head["same"].keys() == {"row", "column", "box"}
  same = {"row": 0.25, "column": 0.25, "box": 0.25}
  assert numbers["uniform"]["same"] == same


@pytest.mark.long
def test_what_does_not_apply_is_left_out(tmp_path):
  _write_metrics(tmp_path)
  (tmp_path / "figures").mkdir()
  result = _draw(
    tmp_path,
    model__halting="fixed",
    model__num_memory_tokens=0,
    eval__depth_factor=0,
  )
  _check(tmp_path, result, _ALWAYS - {"depth"} | {"curves"})
  assert result.scores == {}


@pytest.mark.long
def test_ponder_model_without_metrics(tmp_path):
  result = _draw(tmp_path, model__halting="ponder")
  _check(tmp_path, result, _ALWAYS | _HALTING)


@pytest.mark.long
@crossing(
  ("family", "names"),
  [
    ("looped", {"curves", "depth", "puzzle", "puzzle_failed"}),
    ("adaptive", {"curves", "exits"}),
    ("sleep", {"curves", "depth"}),  # By runs of 1, 2, ... passes.
  ],
  manual=[("sleep", {"curves", "depth"})],  # Four seconds.
)
def test_another_family_solves_sudoku(family, names, tmp_path):
  """Figures without traces are omitted, and nothing fails."""
  _write_metrics(tmp_path)
  depth = {"eval__depth_factor": 0} if family == "adaptive" else {}
  result = _draw(tmp_path, family, **depth)
  assert result.failed == []
  assert {path.stem for path in result.files} == names


@pytest.mark.long
def test_a_figure_that_fails_is_named_and_the_others_are_drawn(
  tmp_path, monkeypatch, capsys
):
  _write_metrics(tmp_path)
  stale = tmp_path / "figures" / "puzzle.png"
  stale.parent.mkdir()
  stale.write_bytes(b"of an earlier model")

  def fail(*arguments):
    raise KeyError("a trace that\nis not there")

  monkeypatch.setattr(pictures, "choose", fail)
  monkeypatch.setattr(depth, "scores_by_depth", fail)
  result = _draw(tmp_path)
  assert result.failed == ["puzzle", "puzzle_failed", "halting_map", "depth"]
  assert result.scores == {}
  drawn = {path.stem for path in result.files}
  assert drawn == {
    "curves", "router", "halting", "attention", "attention_heads"
  }  # fmt: skip
  assert not stale.exists()
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 4
  assert lines[0].startswith("warning: puzzle could not be drawn: KeyError: ")
  assert "test_analysis_figures.py:" in lines[0]


def test_a_model_that_cannot_be_looked_at_has_no_figures(
  tmp_path, monkeypatch, capsys
):
  def fail(*arguments):
    raise MemoryError("no room")

  monkeypatch.setattr(evaluated_lib, "evaluate_model", fail)
  assert _draw(tmp_path) == ({}, [], ["figures"])
  assert "MemoryError: no room" in capsys.readouterr().err


def test_the_hard_puzzle_is_chosen(tmp_path):
  evaluated = analysis_examples.evaluate(tmp_path / "figures")
  targets = evaluated.batch["targets"]
  blanks = np.sum(evaluated.batch["inputs"] == 1, axis=1)
  # All are solved at once, except one puzzle in the middle.
  missed = int(np.argsort(blanks)[10])
  logits = np.eye(6)[targets]
  logits[missed] = 0.0
  prediction = np.stack([targets] * 3)
  output = evaluated.output._replace(
    logits=logits, trace={**evaluated.output.trace, "prediction": prediction}
  )
  solved, failed = pictures.choose(evaluated._replace(output=output))
  assert blanks[solved] == blanks.max()
  assert failed == missed
  all_solved = output._replace(logits=np.eye(6)[targets])
  assert pictures.choose(evaluated._replace(output=all_solved))[1] is None
  none_solved = output._replace(logits=np.zeros_like(logits))
  assert pictures.choose(evaluated._replace(output=none_solved))[1] is not None


def test_wrong_digits_are_underlined():
  """Red and green look the same to some readers."""
  board = board_lib.Board(2, 2)
  answer = np.tile([1, 2, 3, 4], 4)
  said = answer.copy()
  said[[5, 14]] = 3, 1
  axes = draw.new(2, 2).subplots()
  state = pictures.BoardState("", said, np.ones(16))
  pictures._draw_state(axes, board, np.zeros(16, int), answer, state)
  (lines,) = (
    c.get_segments() for c in axes.collections if c.get_linewidth() == 1.2
  )
  cells = [(int(line[0][1]), int(line[0][0])) for line in lines]
  assert cells == [(1, 1), (3, 2)]


def test_nothing_is_drawn_of_a_failure_that_is_not_there(tmp_path):
  evaluated = analysis_examples.evaluate(tmp_path / "figures")
  output = evaluated.output._replace(
    logits=np.eye(6)[evaluated.batch["targets"]]
  )
  assert pictures.draw_failed(evaluated._replace(output=output)) == []


def test_series_skip_rows_that_lack_the_metric():
  rows = [
    {"step": 1, "split": "train", "a": 1.0, "b/loop=0": 3.0, "b/loop=1": 4.0},
    {"step": 2, "split": "validation", "a": 9.0},
    {"step": 3, "split": "train", "a": 2.0, "b/loop=0": 5.0},
  ]
  steps, values = series.scalar(rows, "train", "a")
  np.testing.assert_array_equal([steps, values], [[1, 3], [1.0, 2.0]])
  steps, values = series.by_loop(rows, "train", "b")
  np.testing.assert_array_equal(steps, [1])
  np.testing.assert_array_equal(values, [[3.0, 4.0]])
  assert series.by_loop(rows, "train", "c")[1].shape == (0, 0)


def test_a_split_has_its_own_number_of_loops():
  rows = [
    {"step": 1, "split": "train", "b/loop=0": 3.0},
    {"step": 1, "split": "depth", "b/loop=0": 5.0, "b/loop=1": 4.0},
  ]
  steps, values = series.by_loop(rows, "train", "b")
  np.testing.assert_array_equal([steps, *values.T], [[1], [3.0]])
