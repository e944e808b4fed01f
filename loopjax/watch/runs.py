"""The state of a run, finished or not, read from its work directory."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from loopjax.analysis.plots import series
from loopjax.data import TASKS
from loopjax.errors import UserError
from loopjax.run import durations, zoo
from loopjax.run import workdir as workdir_lib

_LEAST_SILENCE = 120.0  # Seconds without a row before a run is called silent.
_ENDED = {"preempted": "stopped on request"}
# Splits of rows that are not from evaluations during training.
_OTHER_SPLITS = ("train", "test", "depth")


class Line(NamedTuple):
  """A metric. label: its name. x: steps, or loops, int [N]. y: f64 [N]."""

  label: str
  x: np.ndarray
  y: np.ndarray


class Run(NamedTuple):
  """The state of a run.

  Attributes:
    name: name of the work directory.
    what: model family and task.
    step: step of the newest row; 0 if there are none.
    num_steps: number of steps of the run.
    state: a phrase such as "training; 5 minutes left".
    ended: whether the run has ended.
    rates: throughput metrics of the newest training row that has them, by name.
    panels: lines by the title of their plot; empty if there are no values yet.
  """

  name: str
  what: str
  step: int
  num_steps: int
  state: str
  ended: bool
  rates: Mapping[str, float]
  panels: Mapping[str, list[Line]]


def read(workdir: pathlib.Path, now: float) -> Run:
  """Reads a run at a time in seconds since the epoch.

  Partly written rows are skipped.

  Raises:
    UserError: the directory contains no run.
  """
  zoo.refuse(workdir, "it has no curves; use `loopjax report` for its scores")
  config_path = workdir / "config.json"
  if not config_path.exists():
    raise UserError(workdir_lib.no_run(workdir, str(workdir)))
  config = workdir_lib.read_config(workdir)
  rows = workdir_lib.read_metrics(workdir)
  training = [row for row in rows if row["split"] == "train"]
  rates = training[-1] if training else {}
  step = max((row["step"] for row in rows), default=0)
  state, ended = _state(workdir, config, rates, step, now)
  TASKS.register_recorded(config["task"])
  task, family = config["task"]["name"], config["model"]["name"]
  return Run(
    name=workdir.absolute().name,  # Also of ".".
    what=f"{family} on {task}",
    step=step,
    num_steps=config["run"]["num_steps"],
    state=state,
    ended=ended,
    rates=rates,
    panels=_panels(rows, TASKS[task].HEADLINE if task in TASKS else ()),
  )


def to_come(workdir: pathlib.Path) -> Run:
  """A run that has no directory yet, or no config."""
  missing = workdir_lib.no_run(workdir, "waiting: it")
  said = "starting" if workdir.is_dir() else missing
  return Run(
    workdir.absolute().name, "run", 0, 1, said, ended=False, rates={}, panels={}
  )


def _state(
  workdir: pathlib.Path,
  config: Mapping[str, Any],
  rates: Mapping[str, float],
  step: int,
  now: float,
) -> tuple[str, bool]:
  """The state of the run as a phrase, and whether the run has ended."""
  summary_path = workdir / "summary.json"
  if summary_path.exists():
    summary = workdir_lib.read_summary(workdir)
    status = summary["status"]
    took = durations.text(summary.get("wall_seconds", 0))
    return f"{_ENDED.get(status, status)} after {took}", True
  path = workdir / "metrics.jsonl"
  newest = path if path.exists() else workdir / "config.json"
  # Another machine's clock may be ahead, and this one's may have been set back.
  silence = max(now - newest.stat().st_mtime, 0.0)
  rate = rates.get("steps_per_second")
  between = config["run"]["log_every"] / rate if rate else 0.0
  if silence > max(_LEAST_SILENCE, 5 * between):
    return f"silent for {durations.text(silence)}", False
  if not rate:
    return "starting", False
  left = max((config["run"]["num_steps"] - step) / rate - silence, 0.0)
  return f"training; {durations.text(left)} left", False


def _panels(
  rows: series.Rows, headline: Iterable[str]
) -> dict[str, list[Line]]:
  """Lines of the loss, the task's scores and the number of loops, by title."""
  evaluated = dict.fromkeys(
    row["split"]
    for row in rows
    if row["split"].partition("_")[0] not in _OTHER_SPLITS
  )
  panels = {"loss, nats": _lines(rows, "loss", ("train", *evaluated))}
  for name in headline:
    if name != "loss":
      panels[name.replace("_", " ")] = _lines(rows, name, evaluated)
  if loops := _loops(rows):
    panels["loops per token"] = loops
  for name in (*headline, "loss", "relative_change"):
    if line := _by_depth(rows, name):
      panels[f"{line.label} by number of loops"] = [line]
  return panels


def _lines(rows: series.Rows, name: str, splits: Iterable[str]) -> list[Line]:
  """A line for each split that has the metric."""
  found = [Line(split, *series.scalar(rows, split, name)) for split in splits]
  return [line for line in found if len(line.x)]


def _by_depth(rows: series.Rows, name: str) -> Line | None:
  """The newest score or state after each evaluated number of loops."""
  newest = next((x for x in reversed(rows) if x["split"] == "depth"), {})
  loops, values = series.by_depth(newest, name)
  return Line(name.replace("_", " "), loops, values) if len(loops) else None


def _loops(rows: series.Rows) -> list[Line]:
  """Loops until a token halts: by layer, or by kind of token."""
  steps, values = series.by_layer(rows, "train", "ponder_steps")
  if len(steps):
    return [
      Line(f"layer {i + 1}", steps, column) for i, column in enumerate(values.T)
    ]
  kinds = {"cells": "ponder_steps_cells", "memory": "ponder_steps_memory"}
  found = [
    Line(kind, *series.scalar(rows, "train", name))
    for kind, name in kinds.items()
  ]
  return [line for line in found if len(line.x)]
