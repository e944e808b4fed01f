"""Command line: `python -m loopjax.serve --workdir=DIR`."""

import pathlib
import sys

from loopjax.errors import Parser, UserError
from loopjax.loop import exits

_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


def main(argv: list[str] | None = None) -> int:
  """Serves a model over HTTP; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.serve",
    description=(
      "Serves a language model to OpenAI's clients: /v1/completions,"
      " /v1/chat/completions, /v1/models, /health, /metrics."
    ),
  )
  parser.add_argument("--workdir", type=pathlib.Path, help="a run")
  parser.add_argument(
    "--hub", type=pathlib.Path, help="a downloaded folder instead of a run"
  )
  parser.add_argument(
    "--dtype", choices=("float32", "bfloat16"), help="for --hub [bfloat16]"
  )
  parser.add_argument("--checkpoint", type=int, help="step [the newest]")
  parser.add_argument("--num_loops", type=int, help="[the run's evaluation's]")
  parser.add_argument(
    "--exit_rule", choices=exits.RULES, help="[the gate, if the model has one]"
  )
  parser.add_argument(
    "--exit_kept",
    choices=exits.KEPT,
    default="copy",
    help="cache entries of skipped loops [copy]",
  )
  parser.add_argument("--cache_kind", help="[the family's own]")
  parser.add_argument("--name", help="model name [the directory's]")
  parser.add_argument(
    "--host", default="127.0.0.1", help="address to listen at [127.0.0.1]"
  )
  parser.add_argument("--port", type=int, default=8000, help="[8000]")
  parser.add_argument(
    "--token_file",
    type=pathlib.Path,
    help="file with the bearer token of clients [none, local clients only]",
  )
  parser.add_argument(
    "--slots", type=int, default=8, help="requests decoded at once [8]"
  )
  parser.add_argument(
    "--max_waiting", type=int, default=64, help="maximum queue length [64]"
  )
  parser.add_argument(
    "--max_tokens", type=int, help="of prompt and completion [as in training]"
  )
  parser.add_argument(
    "--max_new_tokens", type=int, help="of a completion [as --max_tokens]"
  )
  try:
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
    return command.run(command.Options(**options))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
