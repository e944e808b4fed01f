"""Command line: `python -m loopjax.eval.answers WORKDIR --questions=FILE`."""

import pathlib

from loopjax.errors import Parser, leave, one_line_errors
from loopjax.eval.answers import command, questions
from loopjax.generate import source, text_flags
from loopjax.run import user_cache


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Generates answers and prints scores; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.eval.answers",
    description=(
      "Generates a language model's answers to questions and scores them with"
      " pass@k. Run again, the command resumes with the missing answers."
    ),
  )
  source.add_flags(parser)
  parser.add_argument(
    "--questions",
    type=pathlib.Path,
    required=True,
    help='JSON lines with a "question" (or "problem") and an "answer"',
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="use the first N questions [all]"
  )
  parser.add_argument(
    "--template",
    default=command.QUESTION,
    help=f"prompt template, containing {command.QUESTION} [{command.QUESTION}]",
  )
  parser.add_argument(
    "--chat", action="store_true", help="use the model's chat template"
  )
  parser.add_argument(
    "--check",
    choices=questions.CHECKS,
    default=questions.CHECKS[0],
    help="how to compare answers: by the last number, the last mathematical"
    " expression, the whole text, or whether the text contains the answer"
    f" [{questions.CHECKS[0]}]",
  )
  parser.add_argument(
    "--ignore_case",
    action="store_true",
    help="letters of either case are equal in --check=exact and contains",
  )
  parser.add_argument(
    "--k", default="1", help="values of k for pass@k, for example 1,10 [1]"
  )
  parser.add_argument(
    "--slots",
    type=int,
    default=16,
    help="number of answers generated in parallel [16]",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, help="output folder [WORKDIR/eval]"
  )
  text_flags.add_flags(parser)
  options = vars(parser.parse_args(argv))
  text = text_flags.pop_flags(options)
  model = source.pop_flags(options)
  user_cache.keep_compiled()
  command.run(command.Options(model=model, text=text, **options))
  return 0


if __name__ == "__main__":
  leave(main())
