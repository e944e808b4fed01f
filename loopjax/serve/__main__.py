"""Command line: `loopjax serve RUN`."""

import pathlib

from loopjax.commands import hosts
from loopjax.errors import Parser, UserError, leave, one_line_errors
from loopjax.generate import source
from loopjax.run import user_cache

_PACKAGES = ("prometheus_client", "pydantic", "starlette", "uvicorn")


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Serves a model over HTTP; returns the exit status."""
  parser = Parser(
    prog="loopjax serve",
    description=(
      "Serves a language model through an OpenAI-compatible API:"
      " /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."
    ),
  )
  source.add_flags(parser)
  parser.add_argument("--name", help="model name [the directory's]")
  parser.add_argument(
    "--also",
    type=pathlib.Path,
    action="append",
    default=[],
    metavar="RUN",
    help="another model to serve, with its own settings; may be repeated",
  )
  parser.add_argument(
    "--host", default="127.0.0.1", help="address to listen on [127.0.0.1]"
  )
  hosts.add_flags(parser)
  parser.add_argument(
    "--token_file",
    type=pathlib.Path,
    help="file with the clients' bearer token [none: local clients only]",
  )
  parser.add_argument(
    "--cors",
    default="",
    metavar="ORIGINS",
    help="allowed origins of web pages (CORS), comma-separated; * for any"
    " [none]",
  )
  parser.add_argument(
    "--slots",
    type=int,
    default=8,
    help="number of requests decoded in parallel [8]",
  )
  parser.add_argument(
    "--max_waiting", type=int, default=64, help="maximum queue length [64]"
  )
  parser.add_argument(
    "--max_new_tokens",
    type=int,
    help="maximum number of tokens in a completion [--max_tokens]",
  )
  parser.add_argument(
    "--max_connections",
    type=int,
    default=512,
    help="maximum number of open connections [512]",
  )
  parser.add_argument(
    "--prefill_loops",
    type=int,
    default=0,
    help="number of loops for prefill; 0 for as many as in decoding [0]",
  )
  options = vars(parser.parse_args(argv))
  try:
    from loopjax.serve import command
  except ModuleNotFoundError as error:
    if error.name not in _PACKAGES:
      raise
    raise UserError(
      f"serving needs the package {error.name}; install it with pip install"
      " 'loopjax[serve]'"
    ) from None
  model = source.pop_flags(options)
  user_cache.keep_compiled()
  return command.run(command.Options(model=model, **options))


if __name__ == "__main__":
  leave(main())
