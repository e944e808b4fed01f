"""Requests to stop, at every point of a run."""

import errno
import os
import signal
import sys

import pytest
from tests_support import rows_of_metrics as rows
from tests_support import smoke

from loopjax import train
from loopjax.run import metrics, preemption
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import restore

pytestmark = pytest.mark.usefixtures("sketches", "programs")


def config():
  """Steps 5, 15 lie between rows; evaluation in training is at 10."""
  return smoke(
    eval__every=10, eval__batch_size=32, eval__depth_factor=0,
    optim__ema_decay=0.9,
  )  # fmt: skip


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("never_stopped")
  return workdir, train.run(config(), workdir, "train_and_eval")


def stop_at(monkeypatch, polls):
  """The notice comes at one of the times at which a run checks for it."""
  asked = []

  def reached(self):
    asked.append(1)
    return len(asked) == polls

  monkeypatch.setattr(preemption.Notice, "reached", reached)
  return asked


@pytest.mark.long
# A run checks before every call of 5 steps and every batch of an evaluation.
# tests/train/test_train.py stops one between two rows of metrics.
@pytest.mark.parametrize(
  ("polls", "step"),
  [
    (1, 0),
    pytest.param(2, 5, marks=pytest.mark.manual),
    pytest.param(3, 10, marks=pytest.mark.manual),
    (5, 10),
    pytest.param(26, 20, marks=pytest.mark.manual),
  ],
)
def test_stopped_anywhere_it_ends_as_if_not(
  never_stopped, monkeypatch, tmp_path, polls, step
):
  expected_workdir, expected = never_stopped
  with monkeypatch.context() as patch:
    asked = stop_at(patch, polls)
    stopped = train.run(config(), tmp_path, "train_and_eval")
    assert len(asked) == polls
  assert (stopped["status"], stopped["steps"]) == ("preempted", step)
  assert workdir_lib.read_json(tmp_path / "summary.json") == stopped
  done = train.run(config(), tmp_path, "train_and_eval")
  assert done["status"] == "completed"
  assert done["digest"] == expected["digest"]
  assert rows(tmp_path) == rows(expected_workdir)


def test_a_signal_is_taken_once_and_given_back(capfd):
  before = signal.getsignal(signal.SIGTERM)
  notice = preemption.Notice()
  with notice.listening():
    assert not notice.reached()
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.reached()
    assert signal.getsignal(signal.SIGTERM) != before  # May come again.
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with pytest.raises(preemption.Preempted):
      notice.check()
  assert signal.getsignal(signal.SIGTERM) == before
  assert "SIGTERM: saving and stopping" in capfd.readouterr().err


def test_the_loss_of_the_terminal_is_a_request(monkeypatch):
  """Then nothing can be said; nohup keeps the signal away."""
  before, notice = signal.getsignal(signal.SIGHUP), preemption.Notice()
  monkeypatch.setattr(sys, "stderr", None)
  try:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with notice.listening():
      os.kill(os.getpid(), signal.SIGHUP)
      assert not notice.reached()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with notice.listening():
      os.kill(os.getpid(), signal.SIGHUP)
      assert notice.reached()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
  finally:
    signal.signal(signal.SIGHUP, before)


@pytest.mark.long  # It trains.
def test_no_step_is_lost_when_nothing_shows_the_output(monkeypatch, tmp_path):
  """As in `loopjax train | head`: the row of step 10 cannot be printed."""

  def say(self, line):
    if line.startswith("step 10"):
      raise BrokenPipeError(errno.EPIPE, "Broken pipe")

  monkeypatch.setattr(metrics.Writer, "say", say)
  with pytest.raises(BrokenPipeError):
    train.run(config(), tmp_path, "train_and_eval")
  assert restore.steps(tmp_path) == [10]


def test_without_a_signal_nothing_is_left_behind():
  before = signal.getsignal(signal.SIGINT)
  with preemption.Notice().listening():
    assert signal.getsignal(signal.SIGINT) != before
  assert signal.getsignal(signal.SIGINT) == before


def test_a_block_within_gives_nothing_back():
  """Several runs share a notice; one of them ends first."""
  before, notice = signal.getsignal(signal.SIGTERM), preemption.Notice()
  with notice.listening():
    ours = signal.getsignal(signal.SIGTERM)
    with notice.listening():
      pass
    assert signal.getsignal(signal.SIGTERM) == ours != before
  assert signal.getsignal(signal.SIGTERM) == before
