"""Command line: `loopjax hub import|export|retrofit|card|...`."""

import pathlib
from typing import Any

from loopjax.errors import Parser, leave, one_line_errors
from loopjax.hub import card, convert, push
from loopjax.hub import retrofit as retrofit_lib


def _parser() -> Parser:
  parser = Parser(
    prog="loopjax hub",
    description=(
      "Imports a downloaded Hugging Face Hub folder (config.json,"
      " tokenizer.json, safetensors) into a work directory; exports such a"
      " folder, writes its model card and uploads it; turns layers of a"
      " transformer into a loop."
    ),
  )
  commands = parser.add_subparsers(dest="command", required=True)
  reads = commands.add_parser("import", help="import a folder or a GGUF file")
  reads.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
  reads.add_argument("workdir", type=pathlib.Path, metavar="RUN")
  reads.add_argument(
    "--dtype",
    choices=convert.PRECISIONS,
    default="float32",
    help="dtype of parameters [float32]; bfloat16 is not for training",
  )
  reads.add_argument(
    "--sequence_length",
    type=int,
    default=convert.MAX_TOKENS,
    help=f"tokens per row [{convert.MAX_TOKENS}, or the model's context length"
    " if shorter]",
  )
  writes = commands.add_parser(
    "export", help="export a work directory to a folder"
  )
  writes.add_argument("workdir", type=pathlib.Path, metavar="RUN")
  writes.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
  writes.add_argument(
    "--layout",
    choices=convert.LAYOUTS,
    default="",
    help="required; without it, the error names those that fit the model",
  )
  writes.add_argument(
    "--gguf",
    action="store_true",
    help="export to a GGUF file, which FOLDER names",
  )
  writes.add_argument(
    "--dtype",
    choices=convert.EXPORTED,
    default="",
    help="dtype of the tensors [the run's]; q8_0 only for --gguf",
  )
  writes.add_argument("--checkpoint", type=int, help="checkpoint step [newest]")
  writes.add_argument(
    "--max_bytes",
    type=int,
    default=convert.Export("").max_bytes,
    help="maximum size of a file [5 GB]",
  )
  describes = commands.add_parser(
    "card", help="write a model card into an exported folder"
  )
  describes.add_argument("workdir", type=pathlib.Path, metavar="RUN")
  describes.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
  _add_retrofit(commands)
  uploads = commands.add_parser("push", help="upload an exported folder")
  uploads.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
  uploads.add_argument("repository", metavar="OWNER/NAME", help="on the Hub")
  uploads.add_argument(
    "--public", action="store_true", help="make a new repository public"
  )
  return parser


def _add_retrofit(commands: Any) -> None:
  loops = commands.add_parser(
    "retrofit", help="put layers of a transformer into a loop"
  )
  loops.add_argument(
    "source",
    type=pathlib.Path,
    metavar="SOURCE",
    help="a work directory, or a folder of the Hub",
  )
  loops.add_argument("workdir", type=pathlib.Path, metavar="RUN")
  loops.add_argument(
    "--core",
    required=True,
    metavar="s:t",
    help="the layers in the loop, s to t - 1, counted from 0",
  )
  loops.add_argument(
    "--update",
    choices=retrofit_lib.UPDATES,
    default="gate",
    help="how a loop's output updates the state, or 'relaxed': loops of one"
    " block replace the layers [gate]",
  )
  loops.add_argument("--num_loops", type=int, default=4, help="loops [4]")
  loops.add_argument(
    "--relaxed_rank",
    type=int,
    default=0,
    help="with --update=relaxed, the rank of what each loop adds to the shared"
    " matrices",
  )
  loops.add_argument("--checkpoint", type=int, help="checkpoint step [newest]")


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Imports, exports, changes, describes, uploads; returns the exit status."""
  options = vars(_parser().parse_args(argv))
  command = options.pop("command")
  if command == "retrofit":
    source, workdir = (options.pop(name) for name in ("source", "workdir"))
    how = retrofit_lib.Retrofit(**options)
    retrofit_lib.retrofit(source, workdir, how)
    print(f"{workdir}: layers {how.core} of {source} in {how.num_loops} loops")
    return 0
  folder = options.pop("folder")
  if command == "push":
    print(f"{folder}: uploaded to {push.push(folder, **options)}")
    return 0
  workdir = options.pop("workdir")
  if command == "import":
    summary = convert.import_folder(folder, workdir, **options)
    print(f"{workdir}: {summary['parameters']:,} parameters of {folder}")
  elif command == "export":
    convert.export_run(workdir, folder, convert.Export(**options))
    print(f"{folder}: exported from {workdir}")
  else:
    card.write(workdir, folder)
    print(f"{folder / card.FILE}: written from {workdir}")
  return 0


if __name__ == "__main__":
  leave(main())
