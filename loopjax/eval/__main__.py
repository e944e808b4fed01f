"""Command line: `python -m loopjax.eval WORKDIR... --tasks=FILE,...`."""

import pathlib

from loopjax.errors import Parser, leave, one_line_errors
from loopjax.eval import command, scorer
from loopjax.generate import source
from loopjax.run import user_cache
from loopjax.run.checkpoints import quantized


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Scores runs on tasks and prints a table; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.eval",
    description=(
      "Scores language models on OLMES request files: bits per byte and"
      " accuracy. Writes WORKDIR/eval/TASK.json and TASK.items.jsonl."
    ),
  )
  parser.add_argument(
    "workdirs", type=pathlib.Path, nargs="+", metavar="WORKDIR", help="runs"
  )
  parser.add_argument(
    "--tasks", default="", help="request files, or file names in --folder"
  )
  parser.add_argument("--folder", type=pathlib.Path, help="request files")
  parser.add_argument(
    "--compare",
    type=pathlib.Path,
    help="baseline run: compare all others with it",
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="number of questions per task [all]"
  )
  parser.add_argument(
    "--zero_shot",
    action="store_true",
    help="remove the solved examples before each question",
  )
  parser.add_argument(
    "--num_loops", type=int, help="number of loops [as in evaluation]"
  )
  parser.add_argument(
    "--exit_threshold",
    type=float,
    help="exit threshold, for models with early exits",
  )
  parser.add_argument("--checkpoint", type=int, help="checkpoint step [newest]")
  parser.add_argument(
    "--weights",
    choices=quantized.WEIGHTS,
    help="quantise the weights [as stored]",
  )
  source.add_bos(parser)
  parser.add_argument(
    "--batch_tokens",
    type=int,
    default=scorer.BATCH_TOKENS,
    help=f"maximum number of tokens in a batch [{scorer.BATCH_TOKENS}]",
  )
  options = vars(parser.parse_args(argv))
  user_cache.keep_compiled()
  command.run(command.Options(**options))
  return 0


if __name__ == "__main__":
  leave(main())
