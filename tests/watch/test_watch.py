"""The live view: input, drawing and end."""

import io
import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from rich.console import Console
from tests_support import refused

from loopjax.watch import __main__ as command
from loopjax.watch import frame, runs

NOW = 1_000_000.0
DONE = {"status": "completed", "metrics": {}, "parameters": 1, "steps": 100}


def make(folder, rows, *, task="sudoku", summary=None, age=1.0):
  """A work directory of 100 steps whose metrics.jsonl is this old."""
  folder.mkdir(parents=True)
  config = {
    "model": {"name": "utm"},
    "task": {"name": task},
    "run": {"num_steps": 100, "log_every": 10},
  }
  (folder / "config.json").write_text(json.dumps(config))
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path = folder / "metrics.jsonl"
  path.write_text("\n".join(lines))
  os.utime(path, (NOW - age, NOW - age))
  if summary:
    (folder / "summary.json").write_text(json.dumps(summary))
  return folder


def train(step, loss=1.0, **values):
  return {"step": step, "split": "train", "loss": loss, **values}


def validation(step, score, loss=2.0):
  row = {"step": step, "split": "validation", "exact_match": score}
  return row | {"loss": loss}


def test_a_half_written_row_is_left_out(tmp_path):
  rows = [train(10), validation(10, 0.1), train(20, 0.5)]
  half = json.dumps(train(30, 0.25))[:-9]
  others = [train("last"), {**train(30), "split": 3}, [30], {"step": 30}]
  whole, cut = (
    runs.read(make(tmp_path / name / "run", more), NOW)
    for name, more in (("a", rows), ("b", [*rows, *others, half]))
  )
  assert cut.step == 20
  for title, lines in whole.panels.items():
    for line, other in zip(lines, cut.panels[title], strict=True):
      assert line.label == other.label
      np.testing.assert_array_equal(line.y, other.y)


def test_panels_are_loss_scores_and_loops(tmp_path):
  halting = {"ponder_steps_cells": 4.0, "ponder_steps_memory": 7.0}
  rows = [
    train(10, 3.0, **halting),
    validation(10, 0.25, 2.5),
    train(20, 2.0, **halting),
    validation(20, 0.5, 1.5),
    {"step": 20, "split": "test", "exact_match": 0.9, "loss": 9.0},
  ]
  panels = runs.read(make(tmp_path / "run", rows), NOW).panels
  scores = ["exact match", "blank accuracy"]
  assert list(panels) == ["loss, nats", *scores, "loops per token"]
  found = {
    title: {line.label: line.y.tolist() for line in lines}
    for title, lines in panels.items()
  }
  assert found["loss, nats"] == {"train": [3, 2], "validation": [2.5, 1.5]}
  assert found["exact match"] == {"validation": [0.25, 0.5]}
  assert not panels["blank accuracy"]
  assert found["loops per token"] == {"cells": [4, 4], "memory": [7, 7]}


def test_scores_by_depth_are_lines_over_loops(tmp_path):
  """Of the newest row, over the evaluated loops."""
  old, new = (
    {"step": step, "split": "depth", "exact_match/loop=0": x,
     "exact_match/loop=3": 2 * x, "exact_match/standard_error/loop=0": 9.0}
    for step, x in ((10, 0.25), (20, 0.5))
  )  # fmt: skip
  panels = runs.read(make(tmp_path / "run", [old, new]), NOW).panels
  [line] = panels["exact match by number of loops"]
  assert line.x.tolist() == [1, 4] and line.y.tolist() == [0.5, 1.0]


def test_layers_have_lines_of_their_own(tmp_path):
  rows = [train(10, **{"ponder_steps/layer=0": 1.5, "ponder_steps/layer=1": 2})]
  [first, second] = runs.read(make(tmp_path / "run", rows), NOW).panels[
    "loops per token"
  ]
  assert (first.label, first.y.tolist()) == ("layer 1", [1.5])
  assert (second.label, second.y.tolist()) == ("layer 2", [2.0])


@pytest.mark.parametrize(
  ("age", "summary", "state", "ended"),
  [
    (20.0, None, "training; 3 minutes left", False),  # 80 steps at 0.4 / s
    (-3600.0, None, "training; 3 minutes left", False),  # A clock was set back.
    (600.0, None, "silent for 10 minutes", False),
    (
      600.0,
      {**DONE, "wall_seconds": 250},
      "completed after 4 minutes",
      True,
    ),
    (
      1.0,
      {"status": "preempted", "wall_seconds": 30},
      "stopped on request after 30 s",
      True,
    ),
    (
      1.0,
      {"status": "diverged", "wall_seconds": 30},
      "diverged after 30 s",
      True,
    ),
  ],
)
def test_how_a_run_is(tmp_path, age, summary, state, ended):
  rows = [train(20, steps_per_second=0.4)]
  run = runs.read(make(tmp_path / "run", rows, age=age, summary=summary), NOW)
  assert (run.state, run.ended) == (state, ended)


def test_a_run_that_has_written_nothing_is_starting(tmp_path):
  folder = make(tmp_path / "run", [])
  (folder / "metrics.jsonl").unlink()
  os.utime(folder / "config.json", (NOW, NOW))
  run = runs.read(folder, NOW)
  assert (run.state, run.step) == ("starting", 0)
  assert not any(run.panels.values())


def test_lines_are_dots_from_corner_to_corner():
  up = runs.Line("up", np.array([0, 10]), np.array([1.0, 5.0]))
  down = runs.Line("down", np.array([0, 10]), np.array([5.0, 1.0]))
  within = frame.limits([up])
  assert within == (0, 10, 1, 5)
  cells, colors = frame.draw([up], 2, 1, within)
  # Four dots across, four down: one in each row and column.
  assert cells.tolist() == [[0x40 | 0x20, 0x02 | 0x08]]
  assert colors.tolist() == [[0, 0]]
  cells, colors = frame.draw([up, down], 2, 1, within)
  both = frame.draw([down], 2, 1, within)[0] | frame.draw([up], 2, 1, within)[0]
  assert np.array_equal(cells, both)
  assert (colors == 1).all()


def test_points_are_joined_and_what_is_outside_is_at_the_edge():
  line = runs.Line("far", np.array([0, 1]), np.array([0.0, 100.0]))
  cells, _ = frame.draw([line], 3, 3, frame.Limits(0, 1, 0, 1))
  assert (cells != 0).any(axis=1).all()  # In every row of characters.


@pytest.mark.parametrize(
  ("value", "bottom", "top"),
  [(2.0, 1.5, 2.5), (-0.25, -0.75, 0.25), (0.0, 0, 1), (0.25, 0, 1), (1, 0, 1)],
)
def test_a_constant_is_in_the_middle_or_a_share(value, bottom, top):
  """No axis of shares goes below 0."""
  line = runs.Line("flat", np.array([5]), np.array([value]))
  assert frame.limits([line]) == (5, 6, bottom, top)


def printed(found, width):
  console = Console(width=width, file=io.StringIO())
  console.print(frame.make(found, width))
  return console.file.getvalue()


def test_a_single_huge_loss_is_drawn():
  line = runs.Line("loss", np.array([5]), np.array([1e17]))
  within = frame.limits([line])
  assert within.bottom < 1e17 < within.top
  frame.plot([line], 20, 3, within)


def test_runs_stand_side_by_side_where_there_is_room(tmp_path):
  halves = [train(10, 4.0), train(50, 2.0, steps_per_second=2.0)]
  found = [
    runs.read(make(tmp_path / name, rows), NOW)
    for name, rows in (
      ("first", halves),
      ("second", [*halves, validation(50, 0.75, 1.5)]),
    )
  ]
  wide, narrow = printed(found, 120), printed(found, 50)
  assert "first" in wide.splitlines()[0]
  assert "second" in wide.splitlines()[0]
  assert "second" not in narrow.splitlines()[0]
  assert max(map(len, wide.splitlines())) <= 120
  for text in (wide, narrow):
    assert text.count("50 of 100 steps") == 2
    assert text.count("2 steps/s") == 2
    assert "validation 0.75" in text
    # One range for both: down to the loss of the second one's evaluation.
    assert len(re.findall(r"[│ ] +4 ", text)) == 2
    assert len(re.findall(r"[│ ] +1\.5 ", text)) == 2
    assert "nothing yet" in text  # The first has no score.


def test_a_run_that_has_ended_leaves_room_for_one_that_trains(tmp_path):
  scores = {"ponder_steps_cells": 4.0, "steps_per_second": 2.0}
  rows = [train(10, 4.0, **scores), validation(10, 0.5), train(50, 2.0)]
  done = {**DONE, "wall_seconds": 250}
  found = [
    runs.read(make(tmp_path / "old", rows, summary=done), NOW),
    runs.read(make(tmp_path / "new", rows), NOW),
  ]
  console = Console(width=80, file=io.StringIO())
  console.print(frame.make(found, 80, 24))
  lines = console.file.getvalue().splitlines()
  assert len(lines) <= 24
  assert "new" in lines[0] and "50 of 100 steps" in "".join(lines)
  assert lines[-1] == "old: utm on sudoku, completed after 4 minutes"
  console.print(frame.make(found, 80, 100))
  assert console.file.getvalue().count("50 of 100 steps") == 3


def test_without_a_terminal_it_prints_one_frame(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "90")
  rows = [train(10), validation(10, 0.5)]
  folder = make(tmp_path / "run", rows, age=-1e9)
  assert command.main([str(folder)]) == 0
  said = capsys.readouterr().out
  assert said.count("10 of 100 steps") == 1
  assert "\x1b" not in said


@pytest.mark.parametrize("width", ["1", "10"])
def test_a_narrow_terminal_has_a_frame(tmp_path, capsys, monkeypatch, width):
  monkeypatch.setenv("COLUMNS", width)
  folder = make(tmp_path / "run", [train(10), validation(10, 0.5)])
  assert command.main([str(folder), "--once"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines and max(map(len, lines)) <= int(width)


def test_it_follows_until_all_have_ended(tmp_path, monkeypatch):
  folder = make(tmp_path / "run", [train(10)])
  waits = []

  def sleep(seconds):
    waits.append(seconds)
    if len(waits) == 2:
      done = {**DONE, "wall_seconds": 20}
      (folder / "summary.json").write_text(json.dumps(done))

  monkeypatch.setattr(command.time, "sleep", sleep)
  console = Console(file=io.StringIO(), force_terminal=True, width=60)
  command._follow(console, [folder], 0.5)
  assert "completed after 20 s" in console.file.getvalue()
  assert waits == [0.5, 0.5]


def test_it_waits_for_a_run_that_is_not_there_yet(tmp_path, monkeypatch):
  """Nor its directory, nor what it writes after compiling."""
  folder, waits = tmp_path / "run", []

  def sleep(seconds):
    waits.append(seconds)
    if len(waits) == 1:
      folder.mkdir()
      (folder / ".lock").touch()
      return
    done = {**DONE, "wall_seconds": 20}
    shutil.rmtree(folder)
    make(folder, [train(10)], summary=done)

  monkeypatch.setattr(command.time, "sleep", sleep)
  console = Console(file=io.StringIO(), force_terminal=True, width=60)
  command._follow(console, [folder], 0.5)
  said = console.file.getvalue()
  assert "waiting" in said and "starting" in said
  assert "completed after 20 s" in said
  (tmp_path / "other").mkdir()
  with refused("other contains no run: config.json is missing"):
    command._follow(console, [tmp_path / "other"], 0.5)


def test_a_run_here_has_a_name(tmp_path, monkeypatch):
  folder = make(tmp_path / "run", [train(10)])
  monkeypatch.chdir(folder)
  assert runs.read(pathlib.Path("."), NOW).name == "run"


def test_a_name_is_text(tmp_path, capsys):
  folder = make(tmp_path / "run[red]", [train(10)])
  assert command.main([str(folder), "--once"]) == 0
  assert "run[red]" in capsys.readouterr().out
