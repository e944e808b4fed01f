"""The command `loopjax` and its subcommands."""

import importlib
import signal
import subprocess
import sys
import types

import pytest
from tests_support import ROOT

import loopjax
from loopjax import __main__ as console


@pytest.fixture
def started(monkeypatch):
  """Records [module, arguments] instead of running the module's main."""
  calls = []

  def import_module(module):
    def main():
      calls.append([module.removesuffix(".__main__"), *sys.argv[1:]])
      return 0

    return types.SimpleNamespace(main=main)

  monkeypatch.setattr(importlib, "import_module", import_module)
  return calls


def start(monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["/somewhere/bin/loopjax", *arguments])
  monkeypatch.setattr(sys, "path", [*sys.path])
  with pytest.raises(SystemExit) as ended:
    console.main()
  return ended.value.code


def test_modules_of_the_folder_come_last(started, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  start(monkeypatch, "report")
  assert sys.path[-1] == str(tmp_path)


def test_items_of_a_sweep_find_modules_of_the_folder_too(tmp_path):
  """They are started with -P, which keeps the folder out of the path."""
  script = """
import importlib, sys, types
import loopjax.__main__
command = types.SimpleNamespace(main=lambda: print(sys.path[-1]) or 0)
importlib.import_module = lambda module: command
sys.argv = ["loopjax", "train"]
loopjax.__main__.main()
"""
  done = subprocess.run(
    [sys.executable, "-P", "-c", script],
    cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True,
    text=True, check=True,
  )  # fmt: skip
  assert done.stdout.strip() == str(tmp_path)


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["train", "--config=c.py"], ["loopjax.main", "--config=c.py"]),
    (["score", "runs/a"], ["loopjax.score", "runs/a"]),
    (["describe", "--json"], ["loopjax.describe", "--json"]),
    (["sweep", "--sweep=s"], ["loopjax.sweep", "--sweep=s"]),
    (["report", "runs/a"], ["loopjax.report", "runs/a"]),
    (["table", "runs/a"], ["loopjax.report.table", "runs/a"]),
    (["fit", "--help"], ["loopjax.fit", "--help"]),
    (["analysis", "runs/a"], ["loopjax.analysis.multihop", "runs/a"]),
    (["dynamics", "runs/a"], ["loopjax.library.dynamics", "runs/a"]),
    (["generate", "--chat"], ["loopjax.generate", "--chat"]),
    (["play", "runs/a"], ["loopjax.play", "runs/a"]),
    (["serve", "--port=1"], ["loopjax.serve", "--port=1"]),
    (["--list"], ["loopjax.main", "--list"]),
  ],
)
def test_a_word_is_a_module(monkeypatch, started, arguments, expected):
  assert (start(monkeypatch, *arguments), started) == (0, [expected])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_without_a_word_it_says_which_there_are(
  monkeypatch, started, arguments, capsys
):
  assert start(monkeypatch, *arguments) == 0
  assert not started
  said = capsys.readouterr().out
  assert len(said.splitlines()) == 12
  assert max(map(len, said.splitlines())) <= 80
  for word in (*console._WORDS, "zoo:sudoku_nine", "--config=sudoku_utm"):
    assert word in said


def test_the_version_is_the_packages(monkeypatch, started, capsys):
  start(monkeypatch, "--version")
  assert not started
  assert capsys.readouterr().out == f"loopjax {loopjax.__version__}\n"


def test_another_word_is_a_mistake(monkeypatch, started, capsys):
  assert (start(monkeypatch, "dance"), started) == (2, [])
  assert capsys.readouterr().err == (
    "error: unknown command 'dance'; expected one of train, score, describe,"
    " sweep, report, table, fit, analysis, dynamics, generate, hub, serve,"
    " play, zoo\n"
  )
  start(monkeypatch, "swep")
  assert capsys.readouterr().err.endswith("; did you mean 'sweep'?\n")


def test_ctrl_c_while_modules_are_imported_shows_no_traceback(monkeypatch):
  def import_module(name):
    raise KeyboardInterrupt

  monkeypatch.setattr(importlib, "import_module", import_module)
  raised = []
  monkeypatch.setattr(signal, "signal", lambda *_: None)
  monkeypatch.setattr(signal, "raise_signal", raised.append)
  assert start(monkeypatch, "report") == 130
  assert raised == [signal.SIGINT]


@pytest.mark.parametrize("word", ["--help", "zoo"])
def test_a_full_disk_behind_the_output_is_named(word):
  command = [sys.executable, "-m", "loopjax", word]
  with open("/dev/full", "w", encoding="utf-8") as full:
    ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
  said = b"error: standard output: No space left on device\n"
  assert (ended.returncode, ended.stderr) == (2, said)


def test_every_word_is_a_command_that_answers(monkeypatch, capsys):
  """For a real module: the flags are the module's own."""
  assert start(monkeypatch, "report", "--help") == 0
  assert "loopjax report" in capsys.readouterr().out


def test_what_needs_no_model_imports_no_jax(tmp_path):
  """It would take ten times as long; in a process of its own, as users have."""
  runs = tmp_path / "a.runs.json"
  commands = [
    ["train", "--help"], ["train", "--nope"], ["score", "--help"],
    ["describe", "--help"], ["zoo"], ["table", "--help"], ["table", str(runs)],
  ]  # fmt: skip
  program = f"""
import subprocess
import sys
from loopjax import __main__ as console
for words in {commands}:
  sys.argv = ["loopjax", *words]
  try:
    console.main()
  except SystemExit as ended:
    assert ended.code == (2 if words[-1] in ("--nope", {str(runs)!r}) else 0)
  heavy = {{"jax", "orbax", "flax", "matplotlib", "scipy"}} & {{*sys.modules}}
  assert not heavy, (words, heavy)
"""
  subprocess.run([sys.executable, "-c", program], check=True)
