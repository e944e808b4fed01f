"""Command line: `loopjax report RUN...`."""

import pathlib

from loopjax.errors import Parser, UserError, leave, one_line_errors
from loopjax.report import page, records
from loopjax.report import runs as runs_lib
from loopjax.run import zoo


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Writes the report and prints its paths; returns the exit status."""
  parser = Parser(
    prog="loopjax report",
    description="Writes report.html, report.md and report.csv, and papers.csv"
    " for sweeps of papers.",
  )
  parser.add_argument(
    "workdirs",
    nargs="+",
    type=pathlib.Path,
    metavar="RUN",
    help="a run, a sweep, a folder of these, or zoo:NAME",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, help="output folder [the only RUN]"
  )
  arguments = parser.parse_args(argv)
  workdirs, out = arguments.workdirs, arguments.out
  if out is None and len(workdirs) > 1:
    raise UserError("--out=FOLDER is required with several work directories")
  out = out or zoo.output(workdirs[0])
  if out.is_file():
    raise UserError(f"{out}: is a file; --out=FOLDER is required")
  found = runs_lib.collect([zoo.located(path) for path in workdirs])
  runs = runs_lib.each_once(*found)
  runs_lib.check_readable(runs)
  paths = page.write(found, out)
  damaged = records.say_incomplete(run for run in runs if run.damaged)
  print(*paths, sep="\n")
  return 2 if damaged else 0


if __name__ == "__main__":
  leave(main())
