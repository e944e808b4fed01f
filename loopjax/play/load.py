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
  """Reads a run; by default the loops of its evaluation, the newest checkpoint.

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
  loops = settings.eval_loops if num_loops is None else num_loops
  if loops < 1:
    raise UserError(f"--num_loops={loops} must be at least 1")
  config_lib.check_loops(settings, loops, f"--num_loops={loops}")
  return VIEWS[task](Source(workdir, settings, loops, checkpoint))
