"""All pictures of a run, in one call."""

import concurrent.futures
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from loopjax import config as config_lib
from loopjax.analysis import curves, depth, halting, maps, passes, sudoku
from loopjax.analysis import view as view_lib
from loopjax.data.sudoku import task as sudoku_task
from loopjax.types import Dataset

# What is drawn for one task alone, by the type of its settings.
TASK_FIGURES: Mapping[type, Callable[[view_lib.View], list[pathlib.Path]]] = {
  sudoku_task.Config: sudoku.draw_all
}


def make_figures(
  settings: config_lib.Settings,
  graphdef: nnx.GraphDef,
  params: Any,
  dataset: Dataset,
  rows: list[dict[str, Any]],
  directory: pathlib.Path,
) -> dict[str, Any]:
  """Draws everything that applies to this model and task.

  All processes call it; the first one draws.

  Args:
    settings: of the run.
    graphdef: the model without its parameters.
    params: parameters or their average.
    dataset: the evaluation split.
    rows: of the run's metrics.jsonl.
    directory: where the pictures go; it is made.

  Returns:
    {"depth": vectors over loops by name, for the row of split "depth" (empty
    if eval.depth_factor is 0), "files": paths of what was written}.
  """
  if jax.process_count() > 1:  # Each holds a part of the arrays.
    params = multihost_utils.process_allgather(params, tiled=True)
  if jax.process_index():
    return {"depth": {}, "files": []}
  view = view_lib.make_view(
    settings, graphdef, params, dataset, rows, directory
  )
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    # The longest computation goes on while the pictures are drawn.
    depth_scores = thread.submit(_depth_scores, view)
    files = _draw(view)
    scores = depth_scores.result()
  if scores:
    num_examples = min(settings.eval.depth_examples, len(view.batch["inputs"]))
    files += curves.draw_depth(
      scores, settings.model.num_loops, num_examples, view.directory
    )
  return {"depth": scores, "files": files}


def _depth_scores(view: view_lib.View) -> dict[str, np.ndarray]:
  """Accuracy by depth; empty if it is not asked for or cannot be had."""
  if not view.settings.eval.depth_factor:
    return {}
  if "prediction" not in view.output.trace:
    return {}
  return depth.accuracy_by_depth(view)


def _draw(view: view_lib.View) -> list[pathlib.Path]:
  """All pictures but the one of the depth."""
  settings = view.settings
  files = curves.draw_training(
    view.rows, settings.model.num_loops, view.directory
  )
  files += passes.draw_passes(view.rows, view.directory)
  steps = halting.halting_steps(view)
  if steps is not None:
    files += curves.draw_router(view.rows, view.directory)
    files += _draw_halting(view, steps)
  if "attention" in view.output.trace:
    files += _draw_attention(view)
  if draw_task := TASK_FIGURES.get(type(settings.task)):
    files += draw_task(view)
  return files


def _draw_halting(view: view_lib.View, steps: np.ndarray):
  num_memory = view.num_memory
  shares = halting.histogram(steps, view.settings.model.num_loops, num_memory)
  means = {"cells": steps[:, num_memory:].mean()}
  if num_memory:
    means["memory"] = steps[:, :num_memory].mean()
  return curves.draw_halting(shares, means, view.directory)


def _draw_attention(view: view_lib.View):
  weights = view.output.trace["attention"]
  return [
    *maps.draw_attention(weights, view.num_memory, view.directory),
    *maps.draw_heads(weights, view.num_memory, view.spec, view.directory),
  ]
