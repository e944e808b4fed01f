"""Final scores and facts of a run, and scores of any checkpoint."""

import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from loopjax import program as program_lib
from loopjax.program import step
from loopjax.run import metrics, preemption
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import loop as train_loop
from loopjax.types import Dataset


class Scored(NamedTuple):
  """A scored model.

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
  state: step.TrainState,
  teacher_params: Any,
  writer: metrics.Writer,
  finish: Finish,
) -> list[str]:
  """Final scores and figures; names of the figures that failed."""
  params, at = context.program.scored_params(state), int(state.step)
  # Both may score the same training examples, with the same result.
  often = context.evaluator(params, "validation")
  for split, scores in (often | context.evaluator(params, "test")).items():
    writer.write(at, split, scores, once=split not in often)
  extras = finish(
    _scored(
      context, params, teacher_params, "test", context.workdir / "figures"
    )
  )
  for split, scores in extras.scores.items():
    writer.write(at, split, scores, once=True)
  writer.images(at, extras.files)
  return extras.failed


def score_checkpoint(
  context: train_loop.RunContext, finish: Finish
) -> dict[str, Any]:
  """Scores a checkpoint and draws figures; the run itself is unchanged."""
  started, workdir = time.monotonic(), context.workdir
  split = context.program.settings.eval.split
  wanted, at = context.program.settings.eval.checkpoint, None
  if wanted == "best":
    at = restore.best(workdir, context.checkpoints.scores)
  elif wanted != "newest":
    at = int(wanted)
  abstract = context.program.abstract_params
  at, params = restore.chosen_params(
    workdir, at, abstract, f"--workdir={workdir}"
  )
  values: dict[str, float] = {}
  failed: list[str] = []
  try:
    for part, scores in context.evaluator(params, split).items():
      values |= metrics.named(part, scores)
    directory = context.workdir / "evaluation" / "figures"
    extras = finish(_scored(context, params, {}, split, directory))
    for part, scores in extras.scores.items():
      values |= metrics.named(part, scores)
    failed = extras.failed
    status = "completed"
  except preemption.Preempted:
    status = "preempted"
  return {
    "status": status,
    **({"figures_failed": failed} if failed else {}),
    "metrics": values,
    **run_facts(context, params, at, started),
    "digest": integrity.digest(integrity.record(params)),
  }


def _scored(
  context: train_loop.RunContext,
  params: Any,
  teacher_params: Any,
  split: str,
  directory: pathlib.Path,
) -> Scored:
  return Scored(
    context.program,
    params,
    teacher_params,
    context.datasets[split],
    workdir_lib.read_metrics(context.workdir),
    directory,
  )


def run_facts(
  context: train_loop.RunContext, params: Any, at: int, started: float
) -> dict[str, Any]:
  """The entries that training and evaluation share."""
  facts = [dataset.facts for dataset in context.datasets.values()]
  return {
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    "steps": at,
    "wall_seconds": round(time.monotonic() - started, 2),
    "data": {name: value for fact in facts for name, value in fact.items()},
  }
