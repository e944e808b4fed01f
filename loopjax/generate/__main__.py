"""Command line: `loopjax generate RUN --prompt=TEXT`."""

import pathlib

from loopjax.errors import Parser, leave, one_line_errors
from loopjax.generate import command, source, text_flags
from loopjax.run import user_cache


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Generates text in the terminal; returns the exit status."""
  parser = Parser(
    prog="loopjax generate",
    description="Continues a text with a language model, or chats with it.",
  )
  source.add_flags(parser)
  parser.add_argument("--prompt", help="text to continue")
  parser.add_argument(
    "--prompts",
    type=pathlib.Path,
    metavar="FILE",
    help='JSON lines with a "prompt"; prints each with its generated texts',
  )
  parser.add_argument(
    "--slots", type=int, help="number of --prompts generated at once [8]"
  )
  parser.add_argument(
    "--chat", action="store_true", help="chat, using the model's chat template"
  )
  text_flags.add_flags(parser)
  parser.add_argument(
    "--report",
    action="store_true",
    help="print speed, loops and memory at the end",
  )
  options = vars(parser.parse_args(argv))
  text = text_flags.pop_flags(options)
  model = source.pop_flags(options)
  user_cache.keep_compiled()
  command.run(command.Options(model=model, text=text, **options))
  return 0


if __name__ == "__main__":
  leave(main())
