"""Command line: does a config fit into the memory of an absent machine?

  loopjax fit --config=FILE[:preset] --topology=v5e:16x16

Compiles the train step for the machine and prints the memory of one chip.

Exit status: 0 it fits, 1 it does not, 2 a mistake by the user.
"""

import os
import sys
from collections.abc import Sequence

from loopjax import checks
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, one_line_errors
from loopjax.fit import ENVIRONMENT


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax fit", __doc__ or "")
  result.add_argument(
    "--topology",
    metavar="NAME",
    help="machine: v5e:16x16, v4:2x2x1, h200:8, h200:2x8, cpu:8, ...",
  )
  result.add_argument(
    "--memory_gib",
    type=float,
    default=0.0,
    metavar="GIB",
    help="memory per chip [the known value]",
  )
  return result


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the page; returns the exit status."""
  if "jax" not in sys.modules:
    os.environ.update(ENVIRONMENT)
  options = parser().parse_config(argv)
  given = {
    "--config=FILE": options.config is not None,
    "--topology=NAME": options.topology,
  }
  if missing := [flag for flag, there in given.items() if not there]:
    raise UserError(
      f"the following arguments are required: {', '.join(missing)}"
    )
  if options.workdir:
    raise UserError("--workdir has no effect: nothing is written")
  checks.flags_at_least(options, memory_gib=0)
  from loopjax import config as config_lib
  from loopjax.fit import measure, topology

  machine = topology.absent(options.topology, options.memory_gib)
  settings = config_lib.resolve(options.config)
  print(measure.headline(settings, machine), flush=True)
  measured = measure.measure(settings, machine)
  print(measure.page(machine, measured))
  return 0 if measured.fits else 1


if __name__ == "__main__":
  leave(main())
