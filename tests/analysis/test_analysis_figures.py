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
from loopjax.analysis.plots import curves, draw, series
from loopjax.analysis.plots import maps as maps_lib
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


def test_figures_are_of_the_loops_that_are_scored(tmp_path, drawn):
  """`loopjax score --config.eval.num_loops=7` of a model with three loops."""
  folder = tmp_path / "figures"
  folder.mkdir()
  stale = [folder / "skipping.png", folder / "exits.json"]
  for path in stale:
    path.write_bytes(b"of an earlier score")
  result = _draw(tmp_path, eval__num_loops=7)
  assert not result.failed and not any(path.exists() for path in stale)
  (axes,) = drawn["halting.png"].get_axes()
  shares = [[bar.get_height() for bar in bars] for bars in axes.containers]
  assert {len(kind) for kind in shares} == {7}
  assert all(sum(kind) == pytest.approx(1) for kind in shares)
  assert sum(kind[-1] for kind in shares) > 0  # The router halts late at first.
  maps = [x for x in drawn["halting_map.png"].get_axes() if x.images]
  assert {axes.images[0].get_clim() for axes in maps[:2]} == {(0, 7)}
  titles = [axes.get_title() for axes in drawn["puzzle.png"].get_axes()]
  assert any(title.startswith("after loop 7\n") for title in titles)
  assert {value.shape for value in result.scores["depth"].values()} == {(7,)}
  heads = drawn["attention.png"].get_axes()
  assert any("of 7" in axes.get_title() for axes in heads)


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

  solved = evaluated._replace(output=all_solved)  # There is no failure to draw.
  assert pictures.draw_failed(solved) == []


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

  rows += [{"step": 1, "split": "depth", "b/loop=2": 5.0}]  # Its own loops.
  assert series.by_loop(rows, "train", "b")[1].shape == (1, 2)


def evaluated_with(tmp_path, **changes):
  """An evaluated model, with other outputs."""
  evaluated = analysis_examples.evaluate(tmp_path)
  output = evaluated.output._replace(**changes)
  return evaluated._replace(output=output)


def test_a_map_has_queries_from_top_to_bottom(tmp_path, drawn):
  maps = np.zeros((3, 2, 18, 18), np.float32)
  for loop in range(3):
    for head in range(2):
      maps[loop, head, :, loop + 4 * head] = 1.0  # All queries read one key.
      maps[loop, head, 17] = np.eye(18)[16]  # The last query another.
  evaluated = evaluated_with(tmp_path, trace={"attention": maps})
  maps_lib.draw_attention(evaluated)
  panels = drawn["attention.png"].axes[:3]
  for loop, axes in enumerate(panels):
    assert axes.get_title() == f"loop {loop + 1} of 3"
    assert axes.get_xlabel() == "key"
    image = axes.images[0]
    np.testing.assert_array_equal(image.get_array(), maps[loop].mean(axis=0))
    assert image.origin == "upper"
    labels = {
      text.get_text(): where
      for text, where in zip(
        axes.get_xticklabels(), axes.get_xticks(), strict=True
      )
    }
    assert labels == {"mem.": 0.5, "sequence": 9.5}  # Two tokens, sixteen.
  assert panels[0].get_ylabel() == "query"
  assert not panels[1].get_ylabel()


def test_a_head_has_its_own_map_and_its_own_numbers(tmp_path, drawn):
  maps = np.zeros((3, 2, 18, 18), np.float32)
  maps[:, 0, :, 0] = 1.0  # Head 0 reads memory alone,
  maps[:, 1, :, 2:] = 1 / 16  # head 1 the sequence.
  maps[0] = np.eye(18)  # The first loop is not the last.
  evaluated = evaluated_with(tmp_path, trace={"attention": maps})
  maps_lib.draw_heads(evaluated)
  figure = drawn["attention_heads.png"]
  first, second = figure.axes[:2]
  np.testing.assert_array_equal(first.images[0].get_array(), maps[2, 0])
  np.testing.assert_array_equal(second.images[0].get_array(), maps[2, 1])
  assert first.get_title() == "head 0, s→m 1.00"
  assert second.get_title() == "head 1, s→m 0.00"
  numbers = json.loads((tmp_path / "attention_heads.json").read_text())
  found = [
    [round(x, 2) for x in (*row["last"].values(), *row["same"].values())]
    for row in (*numbers["heads"], numbers["uniform"])
  ]
  assert found == [  # s→m, s→s, m→m, m→s; in the same row, column, box.
    [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 1.0, 0.0, 1.0, 0.25, 0.25, 0.25],
    [0.11, 0.89, 0.11, 0.89, 0.25, 0.25, 0.25],
  ]


def test_bars_stand_at_the_loops_at_which_tokens_halt(tmp_path, drawn):
  weight = np.zeros((3, 20, 18), np.float32)
  weight[2, :, 0] = weight[1, :, 1] = 1.0  # Memory: after 3, and after 2.
  weight[0, :, 2:] = 1.0
  weight[0, :5, 2:], weight[1, :5, 2:] = 0.0, 1.0  # A quarter of the cells.
  evaluated = evaluated_with(tmp_path, trace={"weight": weight})
  curves.draw_halting(evaluated)
  (axes,) = drawn["halting.png"].axes
  assert (axes.get_xlabel(), axes.get_ylabel()) == ("loops", "share of tokens")
  found = {
    bars.get_label(): {
      round(bar.get_x() + bar.get_width() / 2, 3): bar.get_height()
      for bar in bars
    }
    for bars in axes.containers
  }
  assert found == {
    "cells, mean 1.2": {0.8: 0.75, 1.8: 0.25, 2.8: 0.0},
    "memory, mean 2.5": {1.2: 0.0, 2.2: 0.5, 3.2: 0.5},
  }


def test_loops_of_cells_stand_in_their_cells(tmp_path, drawn):
  evaluated = analysis_examples.evaluate(tmp_path)
  number = len(evaluated.output.logits)
  taken = np.zeros((number, 18), int)
  taken[:, 2:] = 1 + np.arange(16) // 6  # 1 in the first row, 3 in the last.
  row = pictures.choose(evaluated)[0]
  taken[row, 2] = 3
  pictures._draw_halting_map(evaluated, row, taken)
  left, right, bar = drawn["halting_map.png"].axes
  grid = (1 + np.arange(16) // 6).reshape(4, 4).astype(float)
  mean = grid.copy()
  mean[0, 0] += 2 / number
  grid[0, 0] = 3
  assert bar.get_ylabel() == "loops"
  assert left.get_title() == f"mean over {number} puzzles"
  for axes, wanted, decimals in ((left, mean, 1), (right, grid, 0)):
    np.testing.assert_allclose(axes.images[0].get_array(), wanted, rtol=1e-6)
    written = {
      (int(y), int(x)): text.get_text()
      for text in axes.texts
      for x, y in [text.get_position()]
    }
    assert written == {
      place: f"{value:.{decimals}f}" for place, value in np.ndenumerate(wanted)
    }
  givens = evaluated.batch["inputs"][row].reshape(4, 4) > 1
  framed = {(int(p.get_y()), int(p.get_x())) for p in right.patches}
  assert framed == {tuple(place) for place in np.argwhere(givens).tolist()}


def test_digits_stand_in_their_cells(tmp_path, drawn):
  evaluated = analysis_examples.evaluate(tmp_path)
  targets = evaluated.batch["targets"]
  row = 3
  prediction = np.stack([targets] * 3)
  prediction[0, row, 1] = 1 + targets[row, 1] % 4 + 1  # One is wrong at first.
  trace = {**evaluated.output.trace, "prediction": prediction}
  trace["confidence"] = np.full(prediction.shape, 0.5, np.float32)
  output = evaluated.output._replace(logits=np.eye(6)[targets], trace=trace)
  pictures._draw_puzzle(evaluated._replace(output=output), row, "puzzle.png")
  puzzle, *states = drawn["puzzle.png"].axes
  clues = evaluated.batch["inputs"][row] - 1

  def digits(axes):
    board = np.zeros((4, 4), int)
    for text in axes.texts:
      x, y = text.get_position()
      board[int(y), int(x)] = int(text.get_text())
    return board.ravel()

  np.testing.assert_array_equal(digits(puzzle), clues)
  assert puzzle.get_title() == f"puzzle\n{np.sum(clues > 0)} givens"
  titles = [axes.get_title().split("\n")[0] for axes in states[:4]]
  assert titles == ["after loop 1", "after loop 2", "after loop 3", "output"]
  shown = [*prediction[:, row], targets[row]]
  for axes, said in zip(states[:4], shown, strict=True):
    np.testing.assert_array_equal(digits(axes), said - 1)
  blanks = np.sum(clues <= 0)
  right = blanks - (clues[1] <= 0)
  assert states[0].get_title().endswith(f"{right} of {blanks} blanks correct")
  assert states[1].get_title().endswith("solved")
  # What the legend says of a colour is so.
  cells = states[0].images[0].get_array().reshape(16, 4)
  known = clues > 0
  known[1] = False
  kinds = {
    "given": np.flatnonzero(known)[0],
    "right": np.flatnonzero(~known & (np.arange(16) != 1))[0],
    "wrong, underlined": 1,
  }
  (legend,) = drawn["puzzle.png"].legends
  colors = {
    text.get_text(): patch.get_facecolor()[:3]
    for text, patch in zip(
      legend.get_texts(), legend.legend_handles, strict=True
    )
  }
  assert colors == {
    name: tuple(cells[cell, :3]) for name, cell in kinds.items()
  }


def test_thick_lines_are_around_boxes():
  """Of two rows and three columns."""
  axes = draw.new(2, 2).subplots()
  pictures._draw_lines(axes, board_lib.Board(2, 3))
  upright, level = set(), set()
  for lines in axes.collections:
    for (x, y), (other, _) in lines.get_segments():
      if lines.get_linewidth() > 1:
        (upright if x == other else level).add(x if x == other else y)
  assert (upright, level) == ({0, 3, 6}, {0, 2, 4, 6})


def test_the_router_is_drawn_by_step_and_loop(tmp_path, drawn):
  _write_metrics(tmp_path)
  rows = workdir_lib.read_metrics(tmp_path)
  rows[2] |= {f"router_probability/loop={k}": 0.2 + 0.1 * k for k in range(3)}
  rows[2] |= {f"output_weight/loop={k}": (0.5, 0.3, 0.2)[k] for k in range(3)}
  evaluated = analysis_examples.evaluate(tmp_path)._replace(rows=rows)
  curves.draw_router(evaluated)
  left, right, bar = drawn["router.png"].axes
  assert (left.get_xlabel(), left.get_ylabel()) == ("optimizer steps", "loop")
  (mesh,) = left.collections
  corners = mesh.get_coordinates()
  np.testing.assert_array_equal(corners[0, :, 0], [5, 15, 25])  # Of steps.
  np.testing.assert_array_equal(corners[:, 0, 1], [0.5, 1.5, 2.5, 3.5])
  np.testing.assert_allclose(
    mesh.get_array(), [[0.0, 0.2], [0.1, 0.3], [0.2, 0.4]], atol=1e-12
  )
  assert bar.get_ylabel() == "mean halting probability"
  assert right.get_title("left") == "At step 20, mean over tokens"
  (weights,) = right.containers
  assert weights.get_label() == "weight in the output"
  places = [(p.get_x() + 0.4, p.get_height()) for p in weights]
  np.testing.assert_allclose(places, [(1, 0.5), (2, 0.3), (3, 0.2)])
  (line,) = right.get_lines()
  np.testing.assert_allclose(line.get_xydata(), [(1, 0.2), (2, 0.3), (3, 0.4)])


def test_curves_are_those_of_their_split(tmp_path, drawn):
  rows = [
    {"step": 5, "split": "train", "loss": 3.0, "grad_norm": 4.0},
    {"step": 10, "split": "train", "loss": 2.0, "grad_norm": 2.0},
    {"step": 10, "split": "validation", "loss": 2.5, "exact_match": 0.25}
    | {"loss/standard_error": 0.5},
  ]
  curves.draw_training(rows, ("exact_match",), 3, tmp_path)
  panels = {axes.get_title("left"): axes for axes in drawn["curves.png"].axes}
  loss = panels["Loss"]
  assert (loss.get_xlabel(), loss.get_ylabel()) == (
    "optimizer steps", "nats per token",
  )  # fmt: skip
  found = {x.get_label(): x.get_xydata().tolist() for x in loss.get_lines()}
  assert found == {
    "training, including penalties": [[5, 3.0], [10, 2.0]],
    "validation": [[10, 2.5]],
  }
  (band,) = loss.collections
  low, high = band.get_datalim(loss.transData).intervaly
  assert (low, high) == (2.0, 3.0)
  (scores,) = panels["Scores of the validation split"].get_lines()
  assert scores.get_label() == "exact match"
  assert scores.get_xydata().tolist() == [[10, 0.25]]
