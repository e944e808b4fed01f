"""Mazes, checked by a search in their text form."""

import collections
import dataclasses
import functools
import itertools

import data_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.data import pipeline
from loopjax.data.maze import task
from loopjax.types import Output

CONFIG = task.Config(size=12, min_path=14, openness=0.15, num_eval_examples=40)
LETTERS = "?# SGo"


def text_of(tokens, size):
  return ["".join(LETTERS[t] for t in row) for row in tokens.reshape(size, -1)]


def find(lines, letter):
  return [
    (i, j) for i, line in enumerate(lines) for j, x in enumerate(line)
    if x == letter
  ]  # fmt: skip


def steps_from(lines, start):
  """Steps from a cell to every reachable cell."""
  found, queue = {start: 0}, collections.deque([start])
  while queue:
    i, j = here = queue.popleft()
    for there in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
      inside = all(0 <= x < len(lines) for x in there)
      if inside and lines[there[0]][there[1]] != "#" and there not in found:
        found[there] = found[here] + 1
        queue.append(there)
  return found


batches = functools.partial(data_examples.read, task, num=2)


def test_every_path_is_a_shortest_one():
  """By breadth-first search over the text; at least of the requested length."""
  lengths = []
  for batch in batches(CONFIG, "train")[1]:
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
      lines, answer = (text_of(x, CONFIG.size) for x in (inputs, targets))
      (start,), (goal,) = find(lines, "S"), find(lines, "G")
      steps = steps_from(lines, start)
      path = find(answer, "o")
      assert len(path) == steps[goal] - 1
      ordered = sorted([start, *path, goal], key=steps.get)
      assert [steps[cell] for cell in ordered] == list(range(len(ordered)))
      for (i, j), (k, m) in itertools.pairwise(ordered):
        assert abs(i - k) + abs(j - m) == 1
      assert "\n".join(answer).replace("o", " ") == "\n".join(lines)
      # Every free cell is reachable; a border on two sides is wall.
      assert len(steps) == sum(x != "#" for line in lines for x in line)
      assert set(lines[-1]) == {"#"}
      lengths.append((steps[goal], max(steps.values())))
  assert all(
    length >= min(CONFIG.min_path, 2 * (longest // 2))
    for length, longest in lengths
  )
  assert len(set(lengths)) > 5


@pytest.mark.parametrize("openness", [0.0, 1.0])
def test_openness_is_from_a_tree_to_no_walls(openness):
  numbers = pipeline.uniforms(3, np.arange(20), task.num_uniforms(5))
  mazes = task.make_mazes(numbers, 5, openness, 1)
  ways = mazes.open.sum(axis=(1, 2, 3)) // 2
  np.testing.assert_array_equal(ways, 24 if openness == 0 else 40)


def test_starts_and_goals_are_anywhere():
  numbers = pipeline.uniforms(5, np.arange(600), task.num_uniforms(3))
  mazes = task.make_mazes(numbers, 3, 0.1, 1)
  for room in (mazes.start, mazes.goal):
    assert np.bincount(room, minlength=9).min() > 30
  assert (mazes.start != mazes.goal).all()


def test_a_number_of_training_mazes_is_kept_to():
  config = dataclasses.replace(CONFIG, num_train_mazes=20)
  dataset, found = batches(config, "train", num=10)
  rows = {row.tobytes() for batch in found for row in batch["inputs"]}
  assert len(rows) == dataset.facts["train_examples"] == 20


@pytest.mark.long
def test_a_maze_is_seen_turned_and_reflected_with_its_path():
  config = dataclasses.replace(CONFIG, num_train_mazes=1, augment=True)
  _, found = batches(config, "train", num=20)
  seen = {row.tobytes() for batch in found for row in batch["inputs"]}
  assert len(seen) == 8
  output = Output(None, {}, {}, {}, {})
  for batch in found[:2]:
    answer = jax.nn.one_hot(batch["targets"], 6)
    scores = task.score(output._replace(logits=answer), batch)
    assert np.all(scores["shortest_path"] == 1)
    paths = np.sum(batch["targets"] == task.PATH, axis=1)
    assert len({*paths.tolist()}) == 1
  again = batches(config, "train", num=20)[1][7]["inputs"]
  np.testing.assert_array_equal(again, found[7]["inputs"])


def test_evaluation_is_by_the_length_of_the_path():
  dataset, found = batches(CONFIG, "test", num=3)
  assert dataset.groups["path"] == ("0-19", "20-49", "50-109", "110+")
  for batch in found:
    length = np.sum(batch["targets"] == task.PATH, axis=1) + 1
    expected = np.searchsorted([20, 50, 110], length, "right")
    np.testing.assert_array_equal(batch["group/path"], expected)
  assert sum(batch["valid"].sum() for batch in found) == 40


SQUARE = ["S  #", " #  ", "   G", "####"]  # Two shortest paths of 5 steps.


def scores(answer, target=("Soo#", " #o ", "  oG", "####")):
  tokens = [
    np.array([[LETTERS.index(x) for line in lines for x in line]])
    for lines in (SQUARE, target, answer)
  ]
  logits = jax.nn.one_hot(tokens[2], 6)
  batch = {"inputs": tokens[0], "targets": tokens[1]}
  found = task.score(Output(logits, {}, {}, {}, {}), batch)
  return {name: float(value[0]) for name, value in found.items()}


def test_the_shorter_of_two_paths_is_the_better_answer():
  """The check reads the maze alone; 0 if the path does not lead to G."""

  def checked(*answer):
    inputs, predicted = (
      jnp.array([[LETTERS.index(x) for line in lines for x in line]], jnp.int32)
      for lines in (SQUARE, answer)
    )
    return float(task.check_answer(None, {"inputs": inputs}, predicted)[0])

  short = checked("S  #", "o#  ", "oooG", "####")
  detour = checked("Sooo", "o#o ", "oooG", "####")
  assert short == pytest.approx(1 / 5)
  assert checked("Soo#", " #oo", "   G", "####") == short
  assert detour == 0  # Through a wall.
  assert checked("Soo#", "o#oo", "oooG", "####") == pytest.approx(1 / 9)
  assert checked("S  #", " #  ", "   G", "####") == 0
  assert checked("S  #", "o#  ", "oo G", "####") == 0


@pytest.mark.long
def test_any_shortest_path_counts_and_nothing_else():
  same = scores(["Soo#", " #o ", "  oG", "####"])
  assert same["shortest_path"] == same["exact_match"] == 1
  assert same["path_overlap"] == 1
  other = scores(["S  #", "o#  ", "oooG", "####"])
  assert other["shortest_path"] == 1
  assert other["exact_match"] == 0
  np.testing.assert_allclose(other["path_overlap"], 1 / 7)
  for wrong in (
    ["S  #", "o#  ", "oo G", "####"],  # Stops before G.
    ["So #", "o#  ", "oo G", "####"],  # As many cells, in two parts.
    ["So #", " o  ", "  oG", "####"],  # Through a wall.
    ["Soo#", "o#o ", "oooG", "####"],  # Both.
    ["S  #", " #  ", "   G", "####"],
  ):
    assert scores(wrong)["shortest_path"] == 0, wrong
