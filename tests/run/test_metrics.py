"""Rows of a run: what is printed."""

import types

from loopjax.run import metrics


def test_what_is_shown_is_what_was_asked_for_in_this_order(tmp_path, capsys):
  shown = ("loss", "right", "steps_per_second")
  writer = metrics.Writer(tmp_path, 20, 0, scored_again=False, shown=shown)
  writer.write(10, "train", {"right": 0.5, "other": 3.0, "loss": 1.25})
  writer.write(10, "eval", {"right": 0.75})
  writer.write(10, "depth", {"other": 1.0})
  writer.close()
  assert capsys.readouterr().out.splitlines() == [
    "step 10/20  train  loss 1.25  right 0.5",
    "step 10/20  eval  right 0.75",
  ]


def test_rates_are_those_since_the_last_ones(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(
    metrics, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
  )

  def take(seconds):
    now[0] += seconds

  clock = metrics.Clock()
  clock.wait(lambda: take(3))
  take(5)
  clock.count(4)
  assert clock.rates(16) == {
    "steps_per_second": 0.5, "examples_per_second": 8.0,
    "data_wait_fraction": 0.375,
  }  # fmt: skip
  clock.wait(lambda: take(1))
  take(1)
  clock.count(10)
  assert clock.rates(16) == {
    "steps_per_second": 5.0, "examples_per_second": 80.0,
    "data_wait_fraction": 0.5,
  }  # fmt: skip
