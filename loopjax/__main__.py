"""The command `loopjax`: one subcommand for each module with a command line.

Subcommands take the flags of their modules.
"""

import gc
import importlib
import os
import sys

import loopjax
from loopjax.errors import UserError, leave, one_line_errors, similar

_USAGE = """\
loopjax COMMAND ...; `loopjax COMMAND --help` shows its flags. Start here:
  play zoo:sudoku_nine          watch a trained model think, in the browser
  zoo list                      trained models that come with the package
  --list                        configs and their presets
  train --config=sudoku_utm     train and evaluate; also describe, sweep
With a RUN, a work directory or zoo:NAME:
  report, table, play           HTML page, table of runs, loop by loop
  generate, serve               text in the terminal, or over HTTP
  score                         scores on its own task
  dynamics                      does its state settle? do more loops help?
  analysis, hub                 states of multi-hop runs; import and export
No run needed: fit (does a config fit a machine you do not have?)"""

# The module whose main is run, and the flags that the subcommand implies.
_WORDS: dict[str, tuple[str, ...]] = {
  "train": ("loopjax.main",),
  "score": ("loopjax.score",),
  "describe": ("loopjax.describe",),
  "sweep": ("loopjax.sweep.__main__",),
  "report": ("loopjax.report.__main__",),
  "table": ("loopjax.report.table",),
  "fit": ("loopjax.fit.__main__",),
  "analysis": ("loopjax.analysis.multihop.__main__",),
  "dynamics": ("loopjax.library.dynamics",),
  "generate": ("loopjax.generate.__main__",),
  "hub": ("loopjax.hub.__main__",),
  "serve": ("loopjax.serve.__main__",),
  "play": ("loopjax.play.__main__",),
  "zoo": ("loopjax.zoo.__main__",),
}


def main() -> None:
  """Runs the main function of the module that the subcommand names."""
  leave(_run())


@one_line_errors  # The import of a module takes seconds, and may be stopped.
def _run() -> int:
  word, *rest = sys.argv[1:] or ["--help"]
  if word in ("--help", "-h", "help"):
    print(_USAGE)
    return 0
  if word == "--version":
    print(f"loopjax {loopjax.__version__}")
    return 0
  if word == "--list":  # The one flag that needs no subcommand.
    word, rest = "train", ["--list"]
  if word not in _WORDS:
    commands = ", ".join(_WORDS)
    near = similar(word, _WORDS)
    raise UserError(
      f"unknown command {word!r}; expected one of {commands}{near}"
    )
  # A config may name a family or task in the current folder. Its modules come
  # last, so that none replaces one of Python's.
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  module, *flags = _WORDS[word]
  sys.argv = [f"loopjax {word}", *flags, *rest]
  # Modules stay: a tenth of the time of imports would go into finding garbage.
  gc.disable()
  try:
    command = importlib.import_module(module)
  finally:
    gc.freeze()
    gc.enable()
  status: int = command.main()
  return status


if __name__ == "__main__":
  main()
