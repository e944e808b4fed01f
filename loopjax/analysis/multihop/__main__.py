"""Command line: `python -m loopjax.analysis.multihop WORKDIR`."""

import pathlib

from loopjax.analysis.multihop import command
from loopjax.errors import Parser, leave, one_line_errors
from loopjax.run import user_cache, zoo


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Analyses a run, prints tables and file paths; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.analysis.multihop",
    description=(
      "Analyses the states between the loops of a multi-hop run at its newest "
      "checkpoint. Loops are numbered from 1, positions from 0."
    ),
  )
  parser.add_argument(
    "workdir", type=pathlib.Path, metavar="WORKDIR", help="a run"
  )
  parser.add_argument(
    "--out", type=pathlib.Path, help="where to write [WORKDIR/analysis]"
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="number of questions [all]"
  )
  parser.add_argument(
    "--loop", type=int, help="only intervene and patch after this loop [all]"
  )
  parser.add_argument(
    "--position",
    type=int,
    help="position to intervene at and patch [first position that sees each "
    "bridge]",
  )
  arguments = parser.parse_args(argv)
  user_cache.keep_compiled()
  command.analyse(
    arguments.workdir,
    arguments.out or zoo.output(arguments.workdir) / "analysis",
    num_examples=arguments.limit,
    loop=arguments.loop,
    position=arguments.position,
  )
  return 0


if __name__ == "__main__":
  leave(main())
