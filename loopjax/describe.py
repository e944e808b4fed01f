"""Prints the size, the costs and the settings of a config; trains nothing.

  loopjax describe --config=FILE[:preset][,section.key=value...]

The page has the number of parameters, the size of the train state, FLOPs by
loop, what a cache takes, and every setting. --config.section.key=value changes
a setting; --json prints the same for programs.
"""

import json
from collections.abc import Sequence

from loopjax import main as main_lib
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, one_line_errors


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax describe", __doc__ or "")
  result.add_argument("--json", action="store_true", help="print JSON")
  result.importer = main_lib.imported
  result.set_defaults(distributed=False, num_processes=None)
  return result


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Describes a config; returns the exit status."""
  options = parser().parse_config(argv)
  if options.workdir:
    raise UserError("--workdir has no effect: nothing is written")
  if options.config is None:
    raise UserError("--config=FILE is missing; loopjax --list shows them")
  from loopjax.commands import describe  # Takes long: not to check flags.

  described = describe.describe(options.config)
  as_json = options.json
  print(
    json.dumps(described, indent=2) if as_json else describe.page(described)
  )
  return 0


if __name__ == "__main__":
  leave(main())
