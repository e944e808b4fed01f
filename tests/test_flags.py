"""Commands that look at runs say the same by the same flags."""

import importlib
import re

import pytest

from loopjax import errors

# Those of absl have their flags from `command_line`.
COMMANDS = (
  "analysis.multihop.__main__", "eval.__main__", "play.__main__",
  "report.__main__", "report.keep", "watch.__main__",
)  # fmt: skip
SAID = {
  "checkpoint": r"step \[the newest\]",
  "limit": r"questions .*\[all\]",
  "num_loops": r"loops \[as the run is evaluated\]",
  "out": r"(where|folder) to write.*",
  "port": r".*\[8000\]",
}
# Other names for one of these, or for the run, which has no flag.
OTHERS = {
  "directory", "examples", "loops", "num_examples", "output", "run", "step",
  "workdir", "workdirs",
}  # fmt: skip


class Made(Exception):
  """A command has made its parser."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_flags_for_the_same(name, monkeypatch):
  def stop(parser, *_):
    raise Made(parser)

  monkeypatch.setattr(errors.Parser, "parse_args", stop)
  command = importlib.import_module(f"loopjax.{name}")
  with pytest.raises(Made) as made:
    command.main([])
  parser = made.value.args[0]
  assert parser.prog == f"python -m loopjax.{name.removesuffix('.__main__')}"
  assert parser.description.endswith(".")
  runs = [a for a in parser._actions if not a.option_strings]
  (run,) = runs
  assert run.metavar == "WORKDIR" and re.match(r"a run\b|runs$", run.help)
  flags = {a.dest: a.help for a in parser._actions if a.option_strings}
  assert not OTHERS & set(flags)
  for flag, said in flags.items():
    assert re.fullmatch(SAID.get(flag, ".*"), said), flag
    # No sentence; what it is without the flag is in brackets.
    assert not said.endswith(".") and "default" not in said, flag
