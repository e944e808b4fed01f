"""The command `loopjax`: one word for each module that is a command.

  loopjax train --config=FILE[:preset]

The words are train, eval, describe, sweep, report, fit and analysis; what comes
after them are the flags of the modules, which `loopjax WORD --help` shows.
`loopjax --list` says what there is to train. `python -m loopjax` is the same.
"""

import runpy
import sys

# The module that does it, and the flags that the word stands for.
_WORDS: dict[str, tuple[str, ...]] = {
  "train": ("loopjax.main",),
  "eval": ("loopjax.main", "--mode=eval"),
  "describe": ("loopjax.main", "--mode=describe"),
  "sweep": ("loopjax.sweep",),
  "report": ("loopjax.report",),
  "fit": ("loopjax.fit",),
  "analysis": ("loopjax.analysis.multihop",),
}


def main() -> None:
  """Runs the module that the first word names, as `python -m` would."""
  word, *rest = sys.argv[1:] or ["--help"]
  if word in ("--help", "-h", "help"):
    print((__doc__ or "").strip())
    return
  if word == "--list":  # What there is to train is asked for before a word.
    word, rest = "train", ["--list"]
  if word not in _WORDS:
    there_are = ", ".join(_WORDS)
    print(f"error: no command {word!r}; there are {there_are}", file=sys.stderr)
    sys.exit(2)
  module, *flags = _WORDS[word]
  sys.argv = [f"loopjax {word}", *flags, *rest]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
