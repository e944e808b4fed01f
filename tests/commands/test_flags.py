"""Commands on runs: shared flags, and names that are not flags."""

import argparse
import importlib
import pathlib
import re

import pytest

from loopjax import __main__ as console
from loopjax import errors, sections
from loopjax.commands import command_line
from loopjax.hub.convert import Export
from loopjax.hub.retrofit import Retrofit
from loopjax.run import zoo

# Commands with a config also have flags from `command_line`.
COMMANDS = (
  "analysis.gradient_flow", "analysis.multihop.__main__",
  "generate.__main__", "play.__main__",
  "report.__main__", "report.keep",  "serve.__main__",
)  # fmt: skip
SAID = {
  "checkpoint": r"checkpoint step \[newest\]",
  "limit": r".*questions.* \[all\]",
  "num_loops": r"number of loops \[as in evaluation\]",
  "out": r"(where to write|output (folder|file)).*",
  "port": r".*\[8000.*\]",
}
# Synonyms of these flags, or of the run, which has no flag.
OTHERS = {
  "directory", "examples", "loops", "num_examples", "output", "run", "step",
  "workdir", "workdirs",
}  # fmt: skip


class Made(Exception):
  """Raised when a command has created its parser."""


def _called(name: str) -> str:
  """How a command is called: by its word, if it has one."""
  words = {modules[0]: word for word, modules in console._WORDS.items()}
  if word := words.get(f"loopjax.{name}"):
    return f"loopjax {word}"
  return f"python -m loopjax.{name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_flags_for_the_same(name, monkeypatch):
  def stop(parser, *_):
    raise Made(parser)

  monkeypatch.setattr(errors.Parser, "parse_args", stop)
  command = importlib.import_module(f"loopjax.{name}")
  with pytest.raises(Made) as made:
    command.main([])
  parser = made.value.args[0]
  assert parser.prog == _called(name)
  assert parser.description.endswith(".")
  runs = [a for a in parser._actions if not a.option_strings]
  (run,) = runs
  assert run.metavar == "RUN" and re.match(r"a run\b|runs$", run.help)
  flags = {a.dest: a.help for a in parser._actions if a.option_strings}
  assert not OTHERS & set(flags)
  for flag, said in flags.items():
    assert re.fullmatch(SAID.get(flag, ".*"), said), flag
    # Not a sentence; the default is in brackets.
    assert not said.endswith(".") and "default" not in said, flag


def _parsers(parser):
  """A parser and those of its commands."""
  yield parser
  for action in parser._actions:
    if isinstance(action, argparse._SubParsersAction):
      for inner in action.choices.values():
        yield from _parsers(inner)


OPTIONS = {"loopjax hub export": Export, "loopjax hub retrofit": Retrofit}


@pytest.mark.parametrize("word", console._WORDS)
def test_a_flag_has_the_default_that_its_help_says(word, monkeypatch):
  """And that of the function in Python."""

  def stop(parser, *_, **__):
    raise Made(parser)

  monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
  module = importlib.import_module(console._WORDS[word][0])
  with pytest.raises(Made) as made:
    module.main([])
  for parser in _parsers(made.value.args[0]):
    for action in parser._actions:
      said = re.search(r"\[(\d[\d.]*|\w+(?=\]))( GB)?", action.help or "")
      if said and action.default and action.default != argparse.SUPPRESS:
        value = type(action.default)(said[1])
        assert value * (10**9 if said[2] else 1) == action.default, action.dest
    if options := OPTIONS.get(parser.prog):
      for name, default in options._field_defaults.items():
        assert parser.get_default(name) in (default, None), name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_run_has_no_flag(name, capsys):
  command = importlib.import_module(f"loopjax.{name}")
  assert command.main(["--workdir=my runs/a"]) == 2
  assert capsys.readouterr().err == (
    "error: --workdir is for training commands; pass the run as an argument:"
    f" {_called(name)} 'my runs/a'\n"
  )


def test_a_path_may_begin_at_home(monkeypatch):
  """After =, where shells do not expand ~."""
  monkeypatch.setenv("HOME", "/home/of")
  parser = errors.Parser()
  parser.add_argument("runs", type=pathlib.Path, nargs="*")
  parser.add_argument("--export", type=pathlib.Path)
  found = parser.parse_args(["~/a", "b", "--export=~/c~"])
  paths = [str(path) for path in (*found.runs, found.export)]
  assert paths == ["/home/of/a", "b", "/home/of/c~"]
  assert str(zoo.located(pathlib.Path("~/a"))) == "/home/of/a"
  with pytest.raises(errors.UserError, match="gs://a/b: buckets are un"):
    parser.parse_args(["--export=gs://a/b"])


def parsed(*words):
  return command_line.ConfigParser("main", "").parse_config(words)


def test_settings_are_read_by_their_types():
  """ConfigDict.update is a method, not to be confused with `model.update`."""
  given = {
    "model.update": "gate", "optim.learning_rate": "1", "run.seed": "7",
    "model.growth_steps": "(5, 10)", "eval.checkpoint": "10",
    "model.calibrated": "true", "run.debug_nans": None, "model.tied": "False",
  }  # fmt: skip
  flags = [
    f"--config.{key}" + ("" if text is None else f"={text}")
    for key, text in given.items()
  ]
  options = parsed("--config=lm_recurrent:smoke", *flags)
  expected = {
    "model.update": "gate", "optim.learning_rate": 1.0, "run.seed": 7,
    "model.growth_steps": (5, 10), "eval.checkpoint": "10",
    "model.calibrated": True, "run.debug_nans": True, "model.tied": False,
  }  # fmt: skip
  assert options.overrides == expected
  assert type(options.overrides["optim.learning_rate"]) is float
  for key, value in expected.items():
    section, _, name = key.partition(".")
    assert options.config[section][name] == value
  written = sections.flags(options.overrides)
  again = parsed("--config=lm_recurrent:smoke", *written)
  assert again.overrides == expected


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["--config.run.seed"], "--config.run.seed needs a value"),
    (["--config.run.seed=x"], "run.seed='x' must be an integer"),
    (["--config.run.seed=1.5"], "run.seed=1.5 must be an integer"),
    (
      ["--config.run.debug_nans=maybe"],
      "run.debug_nans='maybe' must be True or False",
    ),
    (
      ["--config.run.sead=1"],
      "unknown setting 'run.sead'; did you mean run.seed",
    ),
  ],
)
def test_values_of_another_type_are_named(words, said):
  with pytest.raises(errors.UserError, match=re.escape(said)):
    parsed("--config=sudoku_utm:smoke", *words)


def test_only_names_that_are_alike_are_suggested():
  flags = ["--bos", "--prompt", "-h"]
  assert errors.similar("--promt", flags) == "; did you mean '--prompt'?"
  assert errors.similar("--hub", flags) == ""  # Dashes do not count,
  for far, known in (("train", "trace"), ("loss", "loop"), ("weigh", "width")):
    assert errors.similar(far, [known]) == ""
  assert errors.similar("atc", ["act"]) == "; did you mean 'act'?"
  known = dict.fromkeys(["model.rope", "model.width", "run.seed"])
  with pytest.raises(errors.UserError, match="mean model.width"):
    sections.check_key("modle.widht", known)
  with pytest.raises(errors.UserError, match="one of model.rope, model.width"):
    sections.check_key("model.abc", known)  # nor do names of sections.


def test_the_last_config_counts_and_settings_may_come_first():
  words = "--config.run.seed=3", "--config=none.py", "--config", "sudoku_utm"
  options = parsed(*words)
  assert options.config.run.seed == 3
  assert options.config_name.endswith("configs/sudoku_utm.py")
  assert options.workdir is None
