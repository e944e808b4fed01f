"""Scores a trained model on the test split of its task.

  loopjax score RUN

RUN is a work directory, whose config.json has the settings, zoo:NAME, or a
folder of the Hub, which is imported to runs/NAME.
--config.section.key=value changes a setting: --config.task.test_csv=mine.csv
(puzzles) and --config.task.test_files=mine.txt (text) score your own file,
--config.eval.num_loops=24 runs 24 loops, --config.eval.split=validation scores
the validation split. The scores are printed, and written to RUN/evaluation; for
zoo:NAME to runs/NAME/evaluation.

--config=FILE[:preset] names a run by the config that it was trained with,
instead of RUN; --workdir=DIR if it is not in the default place.

Exit status: 0 completed, 1 failed, 2 a mistake by the user.
"""

from collections.abc import Sequence

from loopjax import checks
from loopjax import main as main_lib
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, one_line_errors


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax score", __doc__ or "")
  result.add_argument(
    "run",
    nargs="?",
    metavar="RUN",
    help="a work directory, zoo:NAME or a folder of the Hub",
  )
  result.add_argument(
    "--limit",
    type=int,
    default=0,
    help="number of examples, rounded up to batches of eval.batch_size; 0 for"
    " all [0]",
  )
  command_line.add_processes(result)
  result.importer = main_lib.imported
  result.set_defaults(mode="eval", list=False, extend=False)
  return result


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Scores a trained model; returns the exit status."""
  options = parser().parse_config(argv)
  if options.config is None:
    raise UserError(
      "RUN is missing; expected a work directory, zoo:NAME or a folder of the"
      " Hub"
    )
  checks.flags_at_least(options, limit=0)
  return main_lib.start(options)


if __name__ == "__main__":
  leave(main())
