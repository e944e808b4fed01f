"""Every command of the documentation is started, up to the start of its work.

`test_docs.py` checks the names in them. Their work has its own tests; `.ci/run`
and `.ci/release` run the README's first two commands.
"""

import contextlib
import importlib
import importlib.util
import pathlib
import re
from unittest import mock

import pytest
from docs_examples import NAMES, PAGES, RETROFITTED, commands_of
from tests_support import ROOT, command

from loopjax import config as config_lib
from loopjax.errors import Parser

tokenizers = pytest.importorskip("tokenizers")

# Placeholders of arguments in sentences.
_UNSAID = re.compile(r"^\.\.\.$|^--config=(FILE|\.\.\.)|HOST:PORT|\$")
# Commands with a config -> a function that begins their work.
_BEGINS = {
  "loopjax.main": "loopjax.train.run",
  "loopjax.score": "loopjax.main.start",
  "loopjax.fit": "loopjax.fit.topology.machine",
  "loopjax.analysis.memory": "loopjax.config.resolve",
}


class Begun(BaseException):
  """Raised at the start of a command's work."""


def program(name):
  """The module that `python -m NAME` runs."""
  if importlib.util.find_spec(name).submodule_search_locations:
    name += ".__main__"
  return importlib.import_module(name)


def start(module, arguments, directory):
  """Starts a command; fails unless it reaches its work."""
  if module == "loopjax.describe" or "--list" in arguments:
    assert command(program(module).main, *arguments) == 0
  elif module == "loopjax.sweep":
    only = [] if "--count" in arguments else ["--dry_run"]
    arguments = [*(x for x in arguments if x != "--dry_run"), *only]
    there = contextlib.nullcontext()
    if any("import=" in argument for argument in arguments):
      made = config_lib.make("looped", "text")
      if "--sweep=retrofit" in arguments:
        config_lib.override(made, RETROFITTED)
      there = mock.patch("loopjax.config.config_of_run", return_value=made)
    with there:
      assert command(program(module).main, *arguments, directory=directory) == 0
  elif module in _BEGINS:
    # There is no run to read it of.
    made = config_lib.make("utm", "sudoku")
    if any("import=" in argument for argument in arguments):
      made = config_lib.make("recurrent", "text")
      config_lib.override(made, {"model.update": "gate"})
    if any(".task.test_files=" in argument for argument in arguments):
      made = config_lib.make("looped", "text")
    own = mock.patch("loopjax.config.config_of_run", return_value=made)
    work = _BEGINS[module]
    if any(x.startswith("--compare=") for x in arguments):
      work = "loopjax.train.score.compare_models"
    if "--mode=eval" in arguments:
      work = "loopjax.train.score.score_model"
    begin = mock.patch(work, side_effect=Begun)
    with own, begin, pytest.raises(Begun):
      command(program(module).main, *arguments, directory=directory)
  else:
    parse = Parser.parse_args

    def parsed(*args):
      parse(*args)
      raise Begun

    with mock.patch.object(Parser, "parse_args", parsed), pytest.raises(Begun):
      program(module).main(arguments)


def complete(path):
  """The commands of a page that have all their arguments."""
  return [
    found
    for found in commands_of(path.read_text())
    if found.module
    and found.arguments
    and not any(map(_UNSAID.search, found.arguments[:-1]))
    and not _UNSAID.search(found.arguments[0])
  ]


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_get_to_their_work(path, tmp_path, capsys):
  words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
  tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
  for found in complete(path):
    file = pathlib.Path(found.config[0] if found.config else "")
    copied = file.name and (ROOT / "docs" / "howto" / file.name).exists()
    # The harness's flags are lm_eval's; copied code has its own test.
    if found.module != "loopjax.eval.harness" and not copied:
      start(found.module, found.arguments, tmp_path)
  lines = capsys.readouterr().err.splitlines()
  assert all(" keeps of " in line for line in lines), lines
  assert [x.name for x in tmp_path.iterdir()] == ["tokenizer.json"]


def test_there_are_many():
  found = [found for path in PAGES for found in complete(path)]
  assert len(found) > 80
  assert {"loopjax.main", "loopjax.zoo", "loopjax.serve"} <= {
    x.module for x in found
  }
