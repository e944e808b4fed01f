"""Scores a trained model on the test split of its task.

  loopjax score RUN

RUN is a work directory, whose config.json has the settings, zoo:NAME, or a
folder of the Hub, which is imported to runs/NAME.
--config.section.key=value changes a setting: --config.task.test_csv=mine.csv
(puzzles) and --config.task.test_files=mine.txt (text; mine.jsonl, with
{"text": "..."} per line, for zoo:sums_*) score your own file,
--config.eval.num_loops=24 runs 24 loops, --config.eval.split=validation scores
the validation split. The scores are printed, and written to RUN/evaluation; for
zoo:NAME to runs/NAME/evaluation.

--compare=OTHER prints instead the differences from another trained model on the
same examples, with a 95 % interval and p each.

--config=FILE[:preset] names a run by the config that it was trained with,
instead of RUN; --workdir=DIR if it is not in the default place.

Exit status: 0 completed, 1 failed, 2 a mistake by the user.
"""

from collections.abc import Sequence
from typing import Any

from loopjax import checks
from loopjax import main as main_lib
from loopjax.commands import command_line, document
from loopjax.errors import UserError, leave, local_path, one_line_errors


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
  result.add_argument(
    "--compare",
    metavar="OTHER",
    help="a trained model like RUN, to compare it with on the same examples",
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
  if options.compare is None:
    return main_lib.start(options)
  return _compare(options)


def _compare(options: Any) -> int:
  """Prints the differences from the model of --compare."""
  from loopjax.run import user_cache  # Takes long, as do the next.
  from loopjax.train import score

  if options.workdir is None:
    raise UserError("--compare needs RUN; --config=FILE does not name it")
  if options.distributed or options.num_processes:
    raise UserError("--compare runs in one process")
  user_cache.keep_compiled()
  other = main_lib.imported(options, options.compare)
  source, reference = local_path(options.workdir), local_path(other)
  if source.resolve() == reference.resolve():
    raise UserError(f"--compare={options.compare} is the run itself")
  found = score.compare_models(
    options.config, source, reference, options.overrides, options.limit
  )
  rows = [("score", str(source), str(reference), "difference", "95 %", "p")]
  for name, one in found.items():
    means = f"{one.ours:.4f}", f"{one.reference:.4f}"
    rows.append((name, *means, *one.difference.cells()))
  print(document.aligned(rows))
  return 0


if __name__ == "__main__":
  leave(main())
