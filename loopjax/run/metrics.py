"""Writes metrics to metrics.jsonl, dashboards and the terminal."""

import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import matplotlib.image
import tqdm

from loopjax.run import boards as boards_lib
from loopjax.run import workdir as workdir_lib


class Writer:
  """Writes the rows of one run; process 0 writes, the others are silent.

  After a restore, rows that will be written again are dropped: those past the
  restored step and, if this step is evaluated again, those written after its
  checkpoint, which are all but the training row.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    num_steps: int,
    start_step: int,
    scored_again: bool,
    shown: Sequence[str],
    boards: Sequence[boards_lib.Board] = (),
  ):
    """Opens the files.

    Args:
      num_steps: number of training steps of the run.
      start_step: step from which it resumes.
      scored_again: whether the run will evaluate at this step.
      shown: names of the metrics to print, in this order; a row prints those
        that it has.
      boards: dashboards that receive all metrics; closed with the writer.
    """
    self.active = jax.process_index() == 0
    self.last: dict[str, float] = {}
    if not self.active:
      return
    path = workdir / "metrics.jsonl"
    rows = [
      row
      for row in workdir_lib.read_metrics(workdir)
      if row["step"] < start_step
      or row["step"] == start_step
      and (row["split"] == "train" or not scored_again)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    workdir_lib.write_text(path, text)
    for row in rows:
      self._remember(row)
    self._file = path.open("a", encoding="utf-8")
    self._num_steps, self._shown = num_steps, shown
    self._boards = boards
    self._bar = tqdm.tqdm(
      total=num_steps, initial=start_step, unit="step", disable=None
    )
    if start_step:
      self.say(f"resuming after step {start_step} of {num_steps}")

  def write(
    self, step: int, split: str, values: Mapping[str, Any], once: bool = False
  ) -> None:
    """Appends one row.

    Args:
      step: optimizer steps taken.
      split: "train", "validation", "test", "depth", ...
      values: numbers, or vectors over loops, which become name/loop=k.
      once: whether the run has no other row like it.
    """
    if not self.active:
      return
    scalars = workdir_lib.finite(boards_lib.flat(values))
    row = {"step": step, "split": split, **scalars}
    try:
      self._file.write(json.dumps(row, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:  # A full disk; the error names no file.
      raise OSError(error.errno, error.strerror, self._file.name) from error
    self._remember(row)
    for board in self._boards:
      if once:
        board.once(step, {f"{split}/{name}": x for name, x in values.items()})
      else:
        board.numbers(step, named(split, scalars))
    self._show(step, split, scalars)

  def say(self, line: str) -> None:
    """Prints a line to the terminal."""
    if not self.active:
      return
    if self._bar.disable:
      print(line, flush=True)
    else:
      self._bar.write(line, file=sys.stdout)

  def images(self, step: int, files: Iterable[pathlib.Path]) -> None:
    """Adds PNG files to the boards under their file names."""
    for file in files if self.active else ():
      if file.suffix == ".png":
        pixels = matplotlib.image.imread(file)[..., :3]
        for board in self._boards:
          board.picture(step, file.stem, pixels)

  def close(self) -> None:
    if self.active:
      self._bar.close()
      self._file.close()
      for board in self._boards:
        board.close()

  def _remember(self, row: Mapping[str, Any]) -> None:
    prefix = f"{row['split']}/"
    stale = [name for name in self.last if name.startswith(prefix)]
    for name in stale:  # An old value must not replace a non-finite one.
      del self.last[name]
    for name, value in row.items():
      if name not in ("step", "split"):
        self.last[prefix + name] = value

  def _show(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
    """Prints the few numbers in `shown`."""
    shown = "  ".join(
      f"{name} {scalars[name]:.4g}" for name in self._shown if name in scalars
    )
    self._bar.update(step - self._bar.n)
    if not shown:
      return
    of = f"/{self._num_steps}" if self._bar.disable else ""
    self.say(f"step {step}{of}  {split}  {shown}")


def named(split: str, values: Mapping[str, Any]) -> dict[str, float]:
  """{"split/name": number} of the finite values."""
  scalars = workdir_lib.finite(boards_lib.flat(values))
  return {f"{split}/{name}": value for name, value in scalars.items()}


def scores(
  rows: Iterable[Mapping[str, Any]], best_metric: str
) -> dict[int, float]:
  """The score `run.best_metric` by step; higher is better.

  Args:
    rows: rows of metrics.jsonl.
    best_metric: "split/name", with a leading minus if lower is better.
  """
  split, _, name = best_metric.removeprefix("-").partition("/")
  sign = -1 if best_metric.startswith("-") else 1
  return {
    row["step"]: sign * row[name]
    for row in rows
    if row["split"] == split and math.isfinite(row.get(name, math.nan))
  }


class Clock:
  """Wall time, and the share of it spent waiting for data."""

  def __init__(self):
    self.reset()

  def reset(self) -> None:
    self._start = time.perf_counter()
    self._waited = 0.0
    self._steps = 0

  def wait(self, function):
    """Calls a function that may block on data."""
    start = time.perf_counter()
    result = function()
    self._waited += time.perf_counter() - start
    return result

  def count(self, steps: int) -> None:
    self._steps += steps

  def rates(self, batch_size: int) -> dict[str, float]:
    """Rates since the last call (steps and examples per second)."""
    seconds = time.perf_counter() - self._start
    rates = {
      "steps_per_second": self._steps / seconds,
      "examples_per_second": self._steps * batch_size / seconds,
      "data_wait_fraction": self._waited / seconds,
    }
    self.reset()
    return rates
