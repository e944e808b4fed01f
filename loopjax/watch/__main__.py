"""Command line: `loopjax watch RUN...`."""

import math
import pathlib
import time
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.live import Live

from loopjax.errors import Parser, UserError, leave, one_line_errors
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.watch import frame, runs


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Shows runs until all have ended; returns the exit status."""
  parser = Parser(
    prog="loopjax watch",
    description=(
      "Shows loss, scores, loops, throughput and remaining time of runs until"
      " all have ended or Ctrl-C. Prints one frame if output is not a terminal."
    ),
  )
  parser.add_argument(
    "workdirs", type=pathlib.Path, nargs="+", metavar="RUN", help="runs"
  )
  parser.add_argument(
    "--once", action="store_true", help="print one frame and exit"
  )
  parser.add_argument(
    "--every", type=float, default=2.0, help="seconds between frames [2]"
  )
  jax.config.update("jax_platforms", "cpu")  # The run may use the GPU.
  console = Console()
  try:
    options = parser.parse_args(argv)
    if not 0 < options.every < math.inf:
      raise UserError(f"--every={options.every:g} must be more than 0 seconds")
    if options.once or not console.is_terminal:
      found = _read(options.workdirs)
      console.print(frame.make(found, console.width))
      return 0
    _follow(console, options.workdirs, options.every)
  except KeyboardInterrupt:
    pass
  return 0


def _read(
  workdirs: Sequence[pathlib.Path], wait: bool = False
) -> list[runs.Run]:
  """The runs, including those to come if waiting is allowed."""
  now = time.time()
  return [
    runs.to_come(workdir)
    if wait and not str(workdir).startswith(zoo.PREFIX) and _to_come(workdir)
    else runs.read(workdir, now)
    for workdir in workdirs
  ]


def _to_come(workdir: pathlib.Path) -> bool:
  """Whether a run is not there yet; it has a lock before it has a config."""
  locked = (workdir / workdir_lib.LOCK).exists()
  return not (workdir / "config.json").exists() and (
    locked or not workdir.exists()
  )


def _follow(
  console: Console, workdirs: Sequence[pathlib.Path], every: float
) -> None:
  """Shows frames until all runs have ended."""
  with Live(console=console, auto_refresh=False) as live:
    while True:
      found = _read(workdirs, wait=True)
      shown = frame.make(found, console.width, console.height)
      live.update(shown, refresh=True)
      if all(run.ended for run in found):
        return
      time.sleep(every)


if __name__ == "__main__":
  leave(main())
