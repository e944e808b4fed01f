"""Command line: `python -m loopjax.generate WORKDIR --prompt=TEXT`."""

import dataclasses
import sys

from loopjax.errors import Parser, one_line_errors
from loopjax.generate import command, source
from loopjax.generate.sampling import Sampling


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Generates text in the terminal; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.generate",
    description="Continues a text, or chats, with a language model.",
  )
  source.add_flags(parser)
  parser.add_argument("--prompt", help="a text to continue")
  parser.add_argument(
    "--chat", action="store_true", help="chat, with the model's chat template"
  )
  parser.add_argument(
    "--max_new_tokens",
    type=int,
    help="maximum number of tokens to generate [256, or as many as fit]",
  )
  parser.add_argument(
    "--samples",
    type=int,
    default=1,
    help="number of texts, with consecutive seeds [1]",
  )
  parser.add_argument(
    "--stop",
    action="append",
    default=[],
    help="a string that ends the text; may be repeated",
  )
  for field in dataclasses.fields(Sampling):
    parser.add_argument(
      f"--{field.name}",
      type=type(field.default),
      default=field.default,
      help=f"[{field.default}]",
    )
  parser.add_argument(
    "--exit_threshold",
    type=float,
    default=1.0,
    help="below 1, tokens exit the loop early [1.0]",
  )
  parser.add_argument(
    "--prompt_tokens",
    type=int,
    default=0,
    help="of --max_tokens, reserved for a prompt whose loops share nothing [0]",
  )
  parser.add_argument(
    "--report",
    action="store_true",
    help="print speed, loops and memory at the end",
  )
  try:
    options = vars(parser.parse_args(argv))
    sampling = Sampling(
      **{x.name: options.pop(x.name) for x in dataclasses.fields(Sampling)}
    )
    model = source.pop_flags(options)
    command.run(command.Options(model=model, sampling=sampling, **options))
  except KeyboardInterrupt:
    print()
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
