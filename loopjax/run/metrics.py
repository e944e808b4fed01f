"""Writes metrics to metrics.jsonl, dashboards and the terminal."""

import importlib.util
import json
import math
import pathlib
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import matplotlib.image
import numpy as np
import tensorboardX
import tqdm

from loopjax.errors import UserError, one_line
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
    dashboards: Sequence["TensorBoard | WeightsAndBiases"] = (),
  ):
    """Opens the files.

    Args:
      num_steps: number of training steps of the run.
      start_step: step from which it resumes.
      scored_again: whether the run will evaluate at this step.
      shown: names of the metrics to print, in this order.
      dashboards: dashboards that receive all metrics; closed with the writer.
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
    self._dashboards = dashboards
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
    scalars = workdir_lib.finite(flat(values))
    row = {"step": step, "split": split, **scalars}
    try:
      self._file.write(json.dumps(row, allow_nan=False) + "\n")
      self._file.flush()
    except OSError as error:  # A full disk; the error names no file.
      raise OSError(error.errno, error.strerror, self._file.name) from error
    self._remember(row)
    for dashboard in self._dashboards:
      if once:
        dashboard.once(
          step, {f"{split}/{name}": x for name, x in values.items()}
        )
      else:
        dashboard.numbers(step, named(split, scalars))
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
    """Adds PNG files to the dashboards under their file names."""
    for file in files if self.active else ():
      if file.suffix == ".png":
        pixels = matplotlib.image.imread(file)[..., :3]
        for dashboard in self._dashboards:
          dashboard.picture(step, file.stem, pixels)

  def close(self) -> None:
    if self.active:
      self._bar.close()
      self._file.close()
      for dashboard in self._dashboards:
        dashboard.close()

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


class TensorBoard:
  """Event files under tb/; events of steps to be repeated are dropped.

  They have curves: what is known once is a curve over loops, or the score of a
  split. Standard errors and scores by group are in metrics.jsonl.
  """

  def __init__(self, workdir: pathlib.Path, start_step: int):
    purged = start_step + 1 if start_step else None
    self._writer = tensorboardX.SummaryWriter(
      str(workdir / "tb"), purge_step=purged
    )

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      if not name.endswith("/standard_error"):
        self._writer.add_scalar(name, value, step)

  def once(self, step: int, values: Mapping[str, Any]) -> None:
    whole = {name: x for name, x in values.items() if "=" not in name}
    vectors = {name: x for name, x in whole.items() if np.ndim(x)}
    for name, vector in vectors.items():
      for loops, value in enumerate(vector, 1):
        if math.isfinite(value):
          self._writer.add_scalar(f"{name}_by_loops", value, loops)
    scalars = {name: x for name, x in whole.items() if name not in vectors}
    self.numbers(step, workdir_lib.finite(scalars))

  def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
    self._writer.add_image(name, pixels, step, dataformats="HWC")

  def close(self) -> None:
    self._writer.close()


class WeightsAndBiases:
  """A run on Weights & Biases, resumed whenever the work directory is.

  Steps repeated after a restore are not recorded again.
  """

  def __init__(
    self, workdir: pathlib.Path, project: str, config: Mapping[str, Any]
  ):
    import wandb

    self._wandb = wandb
    run_id = workdir / ".wandb_run"
    if not run_id.exists():
      run_id.write_text(uuid.uuid4().hex, encoding="utf-8")
    try:
      self._run = wandb.init(
        project=project,
        id=run_id.read_text(encoding="utf-8"),
        name=workdir.name,
        dir=str(workdir),
        config=dict(config),
        resume="allow",
      )
    except Exception as error:  # Whatever the network or the library raises.
      raise UserError(
        f"run.wandb_project={project!r}: {one_line(error)};"
        " WANDB_MODE=offline needs no network and no account"
      ) from error

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=step)

  def once(self, step: int, values: Mapping[str, Any]) -> None:
    self.numbers(step, workdir_lib.finite(flat(values)))

  def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
    self._run.log({name: self._wandb.Image(pixels)}, step=step)

  def close(self) -> None:
    self._run.finish()


def check_dashboards(wandb_project: str) -> None:
  """Raises UserError if Weights & Biases is requested but not installed."""
  if wandb_project and importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"run.wandb_project={wandb_project!r} needs the package wandb:"
      " pip install 'loopjax[wandb]'"
    )


def dashboards(
  workdir: pathlib.Path,
  start_step: int,
  wandb_project: str,
  config: Mapping[str, Any],
) -> list[TensorBoard | WeightsAndBiases]:
  """The dashboards of a run, which process 0 alone has."""
  if jax.process_index():
    return []
  found: list[TensorBoard | WeightsAndBiases] = []
  if wandb_project:  # First: it may fail, and an open file must be closed.
    found.append(WeightsAndBiases(workdir, wandb_project, config))
  return [TensorBoard(workdir, start_step), *found]


def flat(values: Mapping[str, Any]) -> dict[str, float]:
  """Scalars by name; the entries of a vector become name/loop=k."""
  scalars = {}
  for name, value in values.items():
    array = np.asarray(value, np.float64)
    if array.ndim == 0:
      scalars[name] = float(array)
    else:
      for loop, entry in enumerate(array):
        scalars[f"{name}/loop={loop}"] = float(entry)
  return scalars


def named(split: str, values: Mapping[str, Any]) -> dict[str, float]:
  """{"split/name": number} of the finite values."""
  scalars = workdir_lib.finite(flat(values))
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
