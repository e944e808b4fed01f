"""Rows of a run: what is printed."""

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
