"""Command line: `loopjax table RUNS...`, a table of the final scores of runs.

RUNS are work directories, sweeps, stored runs (NAME.runs.json), folders of
these, or patterns in quotes. There is a row per run, with the settings in which
the runs differ. With --rows or --columns, the rows and columns are settings,
and runs that differ only in their seeds are averaged: mean, half the width of
its 95 % interval (Student's t), and number of runs: n=2 of 3 if one of them has
no finite score, which standard error names. Runs of the same settings that
learned from different files differ in data.sha256, a digest of their checksums.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from loopjax.commands import document
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.report import grouping, records

_ABSENT = "–"


def parser() -> Parser:
  """The parser of the command line."""
  made = Parser(
    prog="loopjax table",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  made.add_argument("runs", nargs="+", metavar="RUNS", help="see above")
  made.add_argument(
    "--metric",
    action="append",
    default=[],
    metavar="NAME",
    help="a final score such as test/loss, a pattern, steps, parameters or"
    " wall_seconds; can be repeated [all but those of groups and loops]",
  )
  made.add_argument(
    "--rows",
    type=_settings,
    default=[],
    metavar="SETTING,...",
    help="settings that identify a row [all that differ]",
  )
  made.add_argument(
    "--columns",
    type=_settings,
    default=[],
    metavar="SETTING,...",
    help="settings by which columns are divided, such as run.seed",
  )
  form = made.add_mutually_exclusive_group()
  form.add_argument("--csv", action="store_true", help="print CSV")
  form.add_argument("--md", action="store_true", help="print Markdown")
  form.add_argument(
    "--plot",
    type=pathlib.Path,
    metavar="FILE",
    help="draw the scores against the setting of --rows (.png, .pdf, .svg)",
  )
  return made


def _settings(text: str) -> list[str]:
  return [name for name in text.split(",") if name]


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Prints the table, or draws it; returns the exit status."""
  options = parser().parse_args(argv)
  if options.plot and len(options.rows) != 1:
    raise UserError("--plot needs --rows=SETTING, one setting")
  runs = records.read(options.runs)
  if not (options.rows or options.columns):
    found = records.records(runs, options.metric)
    text = records.to_csv(found) if options.csv else _shown(found, options.md)
  else:
    columns = options.columns
    if options.plot:  # Seeds are marks beside their mean.
      columns = [key for key in columns if key not in grouping.SEEDS]
    pivot = records.pivot(runs, options.metric, options.rows, columns)
    records.say_missing(runs, pivot)
    if options.plot:
      text = f"{_draw(pivot, options.rows[0], options.plot)}\n"
    elif options.csv:
      text = records.to_csv(pivot.records())
    else:
      text = _shown(pivot.cells(), options.md)
  damaged = records.say_incomplete(runs)
  print(text, end="")
  return 2 if damaged else 0


def _shown(found: Sequence[dict[str, Any]], markdown: bool) -> str:
  """Records as a table of Markdown, or with aligned columns."""
  header, *lines = [
    list(found[0]),
    *([_as_text(value) for value in row.values()] for row in found),
  ]
  if not markdown:
    return document.aligned([header, *lines]) + "\n"
  plain = [list(map(document.plain, line)) for line in (header, *lines)]
  return document.table(plain[0], plain[1:]) + "\n"


def _as_text(value: Any) -> str:
  """A cell: at most four digits of a score."""
  if isinstance(value, grouping.Spread):
    text = records.score(value.mean, value.interval)
    num, num_missing = len(value.seeds), len(value.missing)
    if num_missing:
      return f"{text} (n={num} of {num + num_missing})"
    return f"{text} (n={num})" if num > 1 else text
  if isinstance(value, float):
    return records.score(value)
  return _ABSENT if value is None else str(value)


def _draw(
  pivot: records.Pivot, setting: str, path: pathlib.Path
) -> pathlib.Path:
  """Draws the scores against a setting; returns the path of the figure."""
  from loopjax.report import plots  # Imports matplotlib, which takes long.

  known = plots.FORMATS
  if path.suffix not in known:
    raise UserError(f"--plot={path}: the name must end with {', '.join(known)}")
  with writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.draw_pivot(pivot, setting).savefig(path, dpi=120, facecolor="white")
  return path


if __name__ == "__main__":
  leave(main())
