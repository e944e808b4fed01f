"""Scores a trained model on its test split.

  loopjax score RUN

RUN is a work directory, whose config.json has the settings, or zoo:NAME.
--config.section.key=value changes a setting: --config.eval.num_loops=24 runs 24
loops, --config.eval.split=validation scores the other split. The scores are
printed, and written to RUN/evaluation. zoo:NAME takes the flags of `loopjax zoo
score`, --limit and --num_loops, and writes nothing.

--config=FILE[:preset] names a run by the config that it was trained with,
instead of RUN; --workdir=DIR if it is not in the default place.

Exit status: 0 completed, 1 failed, 2 a mistake by the user.
"""

import sys
from collections.abc import Sequence

from loopjax import main as main_lib
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, one_line_errors
from loopjax.run import processes, zoo


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  made = command_line.ConfigParser("loopjax score", __doc__ or "")
  made.add_argument(
    "run", nargs="?", metavar="RUN", help="a work directory, or zoo:NAME"
  )
  processes.add_flags(made)
  made.set_defaults(mode="eval", list=False, extend=False, seeds=None)
  return made


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Scores a run, or a model of the zoo; returns the exit status."""
  words = list(sys.argv[1:] if argv is None else argv)
  for word in words:
    if word.startswith(zoo.PREFIX):
      from loopjax.zoo import __main__ as of_zoo

      words.remove(word)
      name = word.removeprefix(zoo.PREFIX)
      return of_zoo.main(["score", name, *words])
  options = parser().parse_config(words)
  if options.config is None:
    raise UserError("RUN is missing; expected a work directory or zoo:NAME")
  return main_lib.start(options)


if __name__ == "__main__":
  leave(main())
