"""Creates the inspector of a run, by its task."""

import pathlib
from collections.abc import Callable, Mapping

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.play import cycle, puzzle, questions, text
from loopjax.play.page import Inspector, Source

# By the name of a task.
VIEWS: Mapping[str, Callable[[Source], Inspector]] = {
  "sudoku": puzzle.load,
  "text": text.load,
  "multihop": questions.load,
  "depo": cycle.load,
}


def load(
  workdir: pathlib.Path,
  num_loops: int | None = None,
  checkpoint: int | None = None,
) -> Inspector:
  """Reads a run; by default its newest checkpoint.

  Args:
    workdir: its work directory.
    num_loops: by default those of its evaluation, and for puzzles at least
      twice those of training.
    checkpoint: a step.

  Raises:
    UserError: there is no such run or checkpoint, the page has no view of its
      task, its model does not show what the view shows, or it cannot run so
      many loops.
  """
  settings = config_lib.of_run(workdir, str(workdir))
  task = settings.plain["task"]["name"]
  if task not in VIEWS:
    raise UserError(
      f"{workdir}: task.name={task!r} has no view; expected one of"
      f" {', '.join(VIEWS)}"
    )
  loops = num_loops
  if loops is None:
    loops = settings.eval_loops
    if task == "sudoku":  # More loops than in training solve more puzzles.
      loops = max(loops, 2 * settings.model.num_loops)
  if loops < 1:
    raise UserError(f"--num_loops={loops} must be at least 1")
  config_lib.check_loops(settings, loops, f"--num_loops={loops}")
  return VIEWS[task](Source(workdir, settings, loops, checkpoint))
