"""Command line: `python -m loopjax.report WORKDIR`."""

import argparse
import pathlib
import sys

from loopjax.errors import UserError
from loopjax.report import page


def main(argv: list[str] | None = None) -> int:
  """Writes the report and prints its paths; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m loopjax.report",
    description="Writes WORKDIR/report.html and WORKDIR/report.md.",
  )
  parser.add_argument("workdir", help="of a sweep or of a single run")
  arguments = parser.parse_args(argv)
  try:
    paths = page.write(pathlib.Path(arguments.workdir))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(*paths, sep="\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
