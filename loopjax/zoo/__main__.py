"""Command line: `loopjax zoo [list|export]`."""

import pathlib

from loopjax.commands import document
from loopjax.errors import Parser, leave, one_line_errors
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.zoo import entries


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Lists or makes entries; returns the exit status."""
  parser = Parser(
    prog="loopjax zoo",
    description=(
      "Trained models that come with loopjax. Commands that load a run, such"
      " as play, score, generate and serve, accept zoo:NAME."
    ),
  )
  commands = parser.add_subparsers(dest="command")
  commands.add_parser("list", help="list the models [this]")
  exports = commands.add_parser("export", help="make a zoo entry from a run")
  exports.add_argument("workdir", type=pathlib.Path, metavar="RUN")
  exports.add_argument("name", metavar="NAME")
  exports.add_argument(
    "--about", required=True, help="one sentence on what the model does"
  )
  exports.add_argument("--dtype", choices=entries.DTYPES, default="float32")
  exports.add_argument(
    "--root", type=pathlib.Path, default=zoo.ROOT, help="[the package]"
  )
  options = vars(parser.parse_args(argv))
  command = options.pop("command")
  if command in ("list", None):
    print(_list())
    return 0
  print(entries.export(**options))
  return 0


def _list() -> str:
  """A line for each entry: name, family, size, commands, what it does."""
  lines = [("name", "model", "parameters", "commands", "description")]
  for name in zoo.names():
    folder = zoo.ROOT / name
    config = workdir_lib.read_json(folder / "config.json")
    summary = workdir_lib.read_json(folder / "summary.json")
    about = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    commands = entries.COMMANDS.get(config["task"]["name"], ())
    lines.append(
      (
        f"{zoo.PREFIX}{name}",
        config["model"]["name"],
        f"{summary['parameters']:,}",
        ", ".join([*commands, "score"]),
        about.partition(". ")[0],
      )
    )
  return document.aligned(lines, num_left=5)


if __name__ == "__main__":
  leave(main())
