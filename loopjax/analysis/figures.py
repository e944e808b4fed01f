"""All figures of a run, in one call."""

import concurrent.futures
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from loopjax import train
from loopjax.analysis import (
  adaptive,
  depth,
  exits,
  sudoku,
  text,
)
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import curves, maps
from loopjax.data.sudoku import task as sudoku_task
from loopjax.errors import one_line


class Figure(NamedTuple):
  """A figure of a run.

  Attributes:
    name: name of its file, without the extension.
    traces: per-loop traces that it needs from the model.
    draw: writes and returns the files; none if there is nothing to draw.
  """

  name: str
  traces: tuple[str, ...]
  draw: Callable[[evaluated_lib.EvaluatedModel], list[pathlib.Path]]


def _curves(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  task, model = evaluated.settings.task_module, evaluated.settings.model
  return curves.draw_training(
    evaluated.rows, task.HEADLINE, model.num_loops, evaluated.directory
  )


FIGURES = (
  Figure("curves", (), _curves),
  Figure(
    "passes",
    (),
    lambda evaluated: curves.draw_passes(evaluated.rows, evaluated.directory),
  ),
  Figure("loops", (), adaptive.draw_loops),
  Figure("memory", (), adaptive.draw_memory),
  Figure("exits", (), adaptive.draw_exits),
  Figure("exit_curve", (), exits.draw_curve),
  Figure("router", ("weight",), curves.draw_router),
  Figure("halting", ("weight",), curves.draw_halting),
  Figure("attention", ("attention",), maps.draw_attention),
  Figure("attention_heads", ("attention",), maps.draw_heads),
)
# Figures of a single task, by the type of its settings.
TASK_FIGURES: Mapping[type, tuple[Figure, ...]] = {
  sudoku_task.Config: (
    Figure("puzzle", ("prediction", "confidence"), sudoku.draw_solved),
    Figure("puzzle_failed", ("prediction", "confidence"), sudoku.draw_failed),
    Figure("halting_map", ("prediction", "weight"), sudoku.draw_halting_map),
  ),
}


def finish(scored: train.Scored) -> train.Extras:
  """Agreement with the teacher, and all figures, of a scored run.

  All processes call it; process 0 draws.
  """
  if jax.process_count() > 1:  # Each process holds only part of the arrays.
    params, teacher_params = multihost_utils.process_allgather(
      (scored.params, scored.teacher_params), tiled=True
    )
    scored = scored._replace(params=params, teacher_params=teacher_params)
  agreed = text.agreement(
    scored.program, scored.params, scored.teacher_params, scored.dataset
  )
  figures = make_figures(scored)
  of_teacher = {"teacher": agreed} if agreed else {}
  return figures._replace(scores=of_teacher | figures.scores)


def make_figures(scored: train.Scored) -> train.Extras:
  """Draws everything that applies to this model and task, in process 0.

  A figure that cannot be drawn is reported on stderr, and the others are still
  drawn. The directory is created if missing.

  Returns:
    The files, and scores by split: "depth", vectors over loops by name, and
    "exits"; without entries that do not apply to the model or that
    eval.depth_factor disables.
  """
  failed: list[str] = []
  if jax.process_index():
    return train.Extras({}, [], failed)

  def attempt(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
      return function(*arguments)
    except Exception as error:  # A figure must not fail a finished run.
      frame = traceback.extract_tb(error.__traceback__)[-1]
      where = f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
      print(
        f"warning: {name} could not be drawn: {type(error).__name__}: "
        f"{one_line(error)} ({where})",
        file=sys.stderr,
        flush=True,
      )
      failed.append(name)
      return None

  program, directory = scored.program, scored.directory
  evaluated = attempt(
    "figures",
    evaluated_lib.evaluate_model,
    program.settings,
    program.graphdef,
    scored.params,
    scored.dataset,
    scored.rows,
    directory,
  )
  if evaluated is None:
    return train.Extras({}, [], failed)
  files: list[pathlib.Path] = []
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    # The longest computation runs while the other figures are drawn.
    computed = thread.submit(depth.scores_by_depth, evaluated)
    of_task = TASK_FIGURES.get(type(program.settings.task), ())
    names = (figure.name for figure in (*FIGURES, *of_task))
    # An earlier model's file could be mistaken for this model's.
    for name in (*names, "depth", "skipping"):
      for kind in ("png", "json"):
        (directory / f"{name}.{kind}").unlink(missing_ok=True)
    for figure in (*FIGURES, *of_task):
      if set(figure.traces) <= evaluated.output.trace.keys():
        files += attempt(figure.name, figure.draw, evaluated) or []
    by_depth = attempt("depth", computed.result)
  scores = {}
  if by_depth:
    files += attempt("depth", _depth, evaluated, by_depth) or []
    scores["depth"] = by_depth
  if skipping := attempt("skipping", exits.measure_skipping, evaluated):
    files += attempt("skipping", exits.draw_skipping, evaluated, skipping) or []
    scores["exits"] = exits.skipping_scores(skipping)
  return train.Extras(scores, files, failed)


def _depth(
  evaluated: evaluated_lib.EvaluatedModel, scores: Mapping[str, np.ndarray]
) -> list[pathlib.Path]:
  settings = evaluated.settings
  num_there = len(evaluated.batch["inputs"])
  num_examples = min(settings.eval.depth_examples or num_there, num_there)
  return depth.draw_depth(
    scores,
    settings.task_module.HEADLINE,
    settings.model.num_loops,
    num_examples,
    evaluated.directory,
  )
