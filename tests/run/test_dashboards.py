"""TensorBoard, and Weights & Biases with a stand-in module."""

import collections
import importlib.machinery
import importlib.util
import json
import struct
import sys
import types

import matplotlib.image
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tests_support import smoke

from loopjax import train
from loopjax.errors import UserError
from loopjax.run import metrics

CONFIG = {"run": {"seed": 3}}


@pytest.fixture
def wandb(monkeypatch):
  """Records its calls in `runs`."""
  module = types.ModuleType("wandb")
  module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
  module.runs, module.Image = [], lambda pixels: ("image", pixels.shape)

  class Run:
    def __init__(self, **arguments):
      self.arguments, self.logged, self.finished = arguments, [], False
      module.runs.append(self)

    def log(self, values, step):
      self.logged.append((step, values))

    def finish(self):
      self.finished = True

  module.init = Run
  monkeypatch.setitem(sys.modules, "wandb", module)
  return module


def write(workdir, start_step, project="loops"):
  writer = metrics.Writer(
    workdir, 20, start_step, scored_again=False, shown=(),
    dashboards=metrics.dashboards(workdir, start_step, project, CONFIG),
  )  # fmt: skip
  writer.write(10, "train", {"loss": 1.5, "halting": np.array([1.0, 2.0])})
  matplotlib.image.imsave(workdir / "puzzle.png", np.zeros((2, 3, 3)))
  writer.images(20, [workdir / "puzzle.png", workdir / "puzzle.svg"])
  writer.close()


def test_what_is_written_is_shown_on_all_boards(tmp_path, wandb):
  write(tmp_path, 0)
  (run,) = wandb.runs
  assert run.arguments["project"] == "loops"
  assert run.arguments["name"] == tmp_path.name
  assert run.arguments["dir"] == str(tmp_path)
  assert run.arguments["config"] == CONFIG
  assert run.logged == [
    (
      10,
      {
        "train/loss": 1.5,
        "train/halting/loop=0": 1.0,
        "train/halting/loop=1": 2.0,
      },
    ),
    (20, {"puzzle": ("image", (2, 3, 3))}),
  ]
  assert run.finished
  events = b"".join(file.read_bytes() for file in (tmp_path / "tb").iterdir())
  assert b"train/halting" in events and b"puzzle" in events


def test_tensorboard_gets_curves_and_few_single_points(tmp_path):
  """Final per-loop scores are a curve; groups are in the report."""
  writer = metrics.Writer(
    tmp_path, 20, 0, scored_again=False, shown=(),
    dashboards=metrics.dashboards(tmp_path, 0, "", CONFIG),
  )  # fmt: skip
  for step in (10, 20):
    scores = {"loss": 1.0, "loss/standard_error": 0.1, "loss/rating=0": 2.0}
    writer.write(step, "validation", scores)
  writer.write(20, "test", scores, once=True)
  depth = {"exact_match": np.array([0.25, np.nan, 0.75])}
  writer.write(20, "depth", depth, once=True)
  writer.close()
  points = collections.defaultdict(list)
  for path in (tmp_path / "tb").iterdir():
    for event in events_of(path.read_bytes()):
      for value in event.summary.value:
        points[value.tag].append((event.step, value.simple_value))
  assert points == {
    "validation/loss": [(10, 1.0), (20, 1.0)],
    "validation/loss/rating_0": [(10, 2.0), (20, 2.0)],
    "test/loss": [(20, 1.0)],
    "depth/exact_match_by_loops": [(1, 0.25), (3, 0.75)],
  }
  last = (tmp_path / "metrics.jsonl").read_text().splitlines()[2:]
  assert json.loads(last[0])["loss/rating=0"] == 2.0  # The file has all.
  assert json.loads(last[1])["exact_match/loop=2"] == 0.75


def events_of(content):
  """The events of a file: length, checksum, event, checksum; repeated."""
  while content:
    (length,) = struct.unpack("<Q", content[:8])
    yield event_pb2.Event.FromString(content[12 : 12 + length])
    content = content[16 + length :]


def test_every_start_goes_on_with_the_same_run(tmp_path, wandb):
  for start_step in (0, 10):
    write(tmp_path, start_step)
  (tmp_path / "other").mkdir()
  write(tmp_path / "other", 0)
  first, second, other = (run.arguments for run in wandb.runs)
  assert first["id"] == second["id"] != other["id"]
  assert second["resume"] == "allow"


def test_without_a_project_it_is_not_asked(tmp_path, wandb):
  write(tmp_path, 0, project="")
  assert not wandb.runs
  assert any((tmp_path / "tb").iterdir())


def test_a_missing_package_is_said_before_anything_is_written(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    UserError, match=r"run.wandb_project='x' .*'loopjax\[wandb"
  ):
    train.run(smoke(run__wandb_project="x"), tmp_path / "run", "train")
  assert not (tmp_path / "run").exists()


def test_no_answer_is_one_line(tmp_path, wandb):
  def init(**arguments):
    raise RuntimeError("no route\nto host")

  wandb.init = init
  with pytest.raises(UserError, match="'loops': no route to host; WANDB_MODE"):
    metrics.dashboards(tmp_path, 0, "loops", CONFIG)
  assert not (tmp_path / "tb").exists()  # Nobody would close it.
