"""Final scores and facts of a run; `train.score` scores any checkpoint."""

import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.program import step as step_lib
from loopjax.program import tree_size
from loopjax.run import metrics, processes
from loopjax.run import workdir as workdir_lib
from loopjax.train import loop as train_loop
from loopjax.types import Dataset


class Scored(NamedTuple):
  """What a `Finish` gets: a model that has its final scores.

  Attributes:
    program: the run's program.
    params: the parameters that were scored.
    teacher_params: the teacher's parameters; {} without one, or if a
      checkpoint of an earlier run was scored.
    dataset: the evaluation split.
    rows: rows of the run's metrics.jsonl.
    directory: where figures go.
  """

  program: program_lib.Program
  params: Any
  teacher_params: Any
  dataset: Dataset
  rows: list[dict[str, Any]]
  directory: pathlib.Path


class Extras(NamedTuple):
  """A run's results besides the scores of its task.

  Attributes:
    scores: further scores by split; a score is a number or one per loop.
    files: files of figures.
    failed: names of the figures that could not be drawn.
  """

  scores: dict[str, dict[str, Any]]
  files: list[pathlib.Path]
  failed: list[str]


# Called with a scored model, by all processes.
Finish = Callable[[Scored], Extras]


def nothing(scored: Scored) -> Extras:
  """A `Finish` without further scores or figures."""
  del scored
  return Extras({}, [], [])


def final_scores(
  context: train_loop.RunContext,
  state: step_lib.TrainState,
  teacher_params: Any,
  writer: metrics.Writer,
  finish: Finish,
) -> list[str]:
  """Final scores and figures; names of the figures that failed."""
  params, step = context.program.scored_params(state), int(state.step)
  # Both may score the same training examples, with the same result.
  validation = context.evaluator(params, "validation")
  for split, scores in (validation | context.evaluator(params, "test")).items():
    writer.write(step, split, scores, once=split not in validation)
  scored = Scored(
    context.program,
    params,
    teacher_params,
    context.datasets["test"],
    workdir_lib.read_metrics(context.workdir),
    context.workdir / "figures",
  )
  extras = finish(scored)
  for split, scores in extras.scores.items():
    writer.write(step, split, scores, once=True)
  writer.images(step, extras.files)
  return extras.failed


def write(
  directory: pathlib.Path,
  settings: config_lib.Settings,
  summary: Mapping[str, Any],
) -> None:
  """Writes config.json and summary.json, by process 0."""
  if jax.process_index() == 0:
    directory.mkdir(exist_ok=True)
    workdir_lib.write_json(directory / "config.json", settings.plain)
    workdir_lib.write_json(directory / "summary.json", summary)
  processes.wait_for_all()  # Process 0 draws; others must wait.


def run_facts(
  datasets: Iterable[Dataset], params: Any, num_steps: int, started: float
) -> dict[str, Any]:
  """The entries that training and evaluation share."""
  return {
    "parameters": tree_size.num_elements(params),
    "steps": num_steps,
    "wall_seconds": round(time.monotonic() - started, 2),
    "data": {k: v for dataset in datasets for k, v in dataset.facts.items()},
  }
