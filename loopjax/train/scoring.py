"""Final scores, figures and facts of a run, and scores of any checkpoint."""

import pathlib
import time
from typing import Any

import jax

from loopjax.analysis import figures
from loopjax.program import step
from loopjax.run import metrics, preemption
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import agreement
from loopjax.train import loop as train_loop


def final_scores(
  context: train_loop.RunContext,
  state: step.TrainState,
  teacher_params: Any,
  writer: metrics.Writer,
) -> list[str]:
  """Final scores and figures; names of the figures that failed."""
  params, at = step.scored_params(state), int(state.step)
  # Both may score the same training examples, with the same result.
  often = context.evaluator(params, "validation")
  for split, scores in (often | context.evaluator(params, "test")).items():
    writer.write(at, split, scores, once=split not in often)
  test = context.datasets["test"]
  if scores := agreement.measure(context.program, params, teacher_params, test):
    writer.write(at, "teacher", scores, once=True)
  drawn = _figures(context, params, "test", context.workdir / "figures")
  for split, scores in drawn.scores.items():
    writer.write(at, split, scores, once=True)
  writer.images(at, drawn.files)
  return drawn.failed


def score_checkpoint(context: train_loop.RunContext) -> dict[str, Any]:
  """Scores a checkpoint and draws figures; the run itself is unchanged."""
  started, workdir = time.monotonic(), context.workdir
  split = context.program.settings.eval.split
  wanted, at = context.program.settings.eval.checkpoint, None
  if wanted == "best":
    at = restore.best(workdir, context.checkpoints.scores)
  elif wanted != "newest":
    at = int(wanted)
  abstract = context.program.abstract_state.params
  at, params = restore.chosen_params(
    workdir, at, abstract, f"--workdir={workdir}"
  )
  values: dict[str, float] = {}
  failed: list[str] = []
  try:
    for part, scores in context.evaluator(params, split).items():
      values |= metrics.named(part, scores)
    directory = context.workdir / "evaluation" / "figures"
    drawn = _figures(context, params, split, directory)
    for part, scores in drawn.scores.items():
      values |= metrics.named(part, scores)
    failed = drawn.failed
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


def _figures(
  context: train_loop.RunContext,
  params: Any,
  split: str,
  directory: pathlib.Path,
) -> figures.Drawn:
  return figures.make_figures(
    context.program.settings,
    context.program.graphdef,
    params,
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
