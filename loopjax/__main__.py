"""The command `loopjax`: one subcommand for each module with a command line.

  loopjax train --config=FILE[:preset]

The subcommands are train, score, describe, sweep, report, fit, analysis, eval,
answers, generate, serve, hub, watch, play and zoo; they take the flags of their
modules, which `loopjax SUBCOMMAND --help` shows. `score` is `train
--mode=eval`: a run on its own task; `eval` scores language models on request
files, `answers` on questions that they answer in their own words, `generate`
writes with them, `serve` answers over HTTP; `hub` reads and writes their
published layout. `watch` shows runs in a terminal, in progress or finished;
`play` shows in the browser what a model thinks, loop by loop; `zoo` lists
trained models that come with the package, `zoo:NAME` wherever a run is read.
`loopjax --list` lists the configs. `python -m loopjax` does the same.
"""

import runpy
import sys

from loopjax.errors import similar

# The module that is run, and the flags that the subcommand implies.
_WORDS: dict[str, tuple[str, ...]] = {
  "train": ("loopjax.main",),
  "score": ("loopjax.main", "--mode=eval"),
  "describe": ("loopjax.main", "--mode=describe"),
  "sweep": ("loopjax.sweep",),
  "report": ("loopjax.report",),
  "fit": ("loopjax.fit",),
  "analysis": ("loopjax.analysis.multihop",),
  "eval": ("loopjax.eval",),
  "answers": ("loopjax.eval.answers",),
  "generate": ("loopjax.generate",),
  "hub": ("loopjax.hub",),
  "serve": ("loopjax.serve",),
  "watch": ("loopjax.watch",),
  "play": ("loopjax.play",),
  "zoo": ("loopjax.zoo",),
}


def main() -> None:
  """Runs the module that the subcommand names, as `python -m` would."""
  word, *rest = sys.argv[1:] or ["--help"]
  if word in ("--help", "-h", "help"):
    print((__doc__ or "").strip())
    return
  if word == "--list":  # The one flag that needs no subcommand.
    word, rest = "train", ["--list"]
  if word not in _WORDS:
    there_are = ", ".join(_WORDS)
    said = f"no command {word!r}; there are {there_are}{similar(word, _WORDS)}"
    print(f"error: {said}", file=sys.stderr)
    sys.exit(2)
  module, *flags = _WORDS[word]
  sys.argv = [f"loopjax {word}", *flags, *rest]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
