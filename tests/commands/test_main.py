"""The command line: one line and exit status 2 for every user error."""

import errno
import functools
import io
import json
import os
import signal
import subprocess
import sys

import jax
import pytest
from tests_support import ROOT, command

from loopjax import config as config_lib
from loopjax import describe, errors, score, train
from loopjax import main as main_lib
from loopjax.analysis import figures
from loopjax.commands import describe as describe_lib
from loopjax.run import processes
from loopjax.run import workdir as workdir_lib
from loopjax.train import score as score_lib


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("X = {}['a']", "{file}, line 1: KeyError: 'a'"),
    (
      "def get_config(arg=''):\n  return None.x",
      "{file}, line 2: AttributeError: 'NoneType' object has no attribute 'x'",
    ),
    ("import nothing", "{file}, line 1: ModuleNotFoundError: No module named"),
    ("def get_config(:", "{file}: SyntaxError: "),
    ("", "the file defines no get_config"),
    (
      "def get_config(arg=''):\n  pass",
      "{file}: get_config returned None, not a config",
    ),
  ],
)
def test_a_mistake_in_a_config_says_where_it_is(
  text, message, tmp_path, monkeypatch, refusal
):
  monkeypatch.delitem(sys.modules, "config_config", raising=False)  # Another's.
  file = tmp_path / "mine.py"
  file.write_text(text)
  error = refusal(command, main_lib.main, f"--config={file}")
  assert error.startswith(f"error: --config: {message.format(file=file)}")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_folder_of_something_else_is_refused(mode, tmp_path, capsys):
  """Other programs write files named config.json too."""
  (tmp_path / "config.json").write_text('{"model_type": "ouro", "width": 8}')
  config = "--config=configs/sudoku_utm.py:smoke,run.num_steps=10"
  flags = config, f"--mode={mode}", f"--workdir={tmp_path}"
  assert command(main_lib.main, *flags) == 2
  error = capsys.readouterr().err
  said = "was not written by loopjax: model is missing or malformed"
  assert error == f"error: {tmp_path}/config.json: {said}\n"


def test_each_of_several_mistakes_has_its_line(tmp_path, capsys):
  workdir = tmp_path / "run"
  wrong = ("optim.schedule=x", "eval.every=-1", "model.halting=atc")
  flags = [f"--config.{setting}" for setting in wrong]
  config = "--config=configs/sudoku_utm.py:smoke"
  assert command(main_lib.main, config, *flags, f"--workdir={workdir}") == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 3
  assert all(line.startswith("error: ") for line in lines)
  assert not workdir.exists()


@pytest.mark.long
def test_mistakes_in_the_run_are_one_line_and_write_nothing(tmp_path):
  """In a separate process, which exits with that status."""
  workdir = tmp_path / "run"
  done = subprocess.run(
    [
      *(sys.executable, "-m", "loopjax.main"),
      "--config=configs/sudoku_utm.py:smoke",
      f"--workdir={workdir}",
      "--config.run.batch_size=15",
    ],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert "run.batch_size=15" in done.stderr
  assert not workdir.exists()


@pytest.mark.long
@pytest.mark.parametrize(
  ("variables", "message"),
  [
    ({"JAX_PLATFORMS": "foo"}, "error: JAX_PLATFORMS=foo: "),
    ({"JAX_ENABLE_X64": "1"}, "error: JAX_ENABLE_X64 is set"),
  ],
)
def test_an_environment_that_cannot_be_used_is_one_line(
  tmp_path, variables, message
):
  done = subprocess.run(
    [
      *(sys.executable, "-m", "loopjax.main"),
      "--config=configs/sudoku_utm.py:smoke",
      f"--workdir={tmp_path / 'run'}",
    ],
    cwd=ROOT,
    env={**os.environ, **variables},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith(message)
  assert not (tmp_path / "run").exists()


@pytest.fixture
def main(tmp_path):
  """The command in a new directory."""
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  return functools.partial(command, main_lib.main, directory=tmp_path)


BARE = "--config=configs/sudoku_utm.py"


def test_a_config_is_all_that_a_run_needs(main, tmp_path, capsys):
  assert main(f"{BARE}:smoke", "--mode=train") == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "work directory: runs/sudoku_utm-smoke"
  assert lines[1].startswith("preset: smoke; others: --config=configs/sudoku_u")
  assert {":gpu,", ":tiny,", ":nine,", ":extreme"} <= set(lines[1].split())
  compiling = lines.index("compiling the training step")
  assert lines[compiling + 1].startswith("compiled the training step in ")
  assert (tmp_path / "runs" / "sudoku_utm-smoke" / "summary.json").exists()
  assert main(f"{BARE}:smoke", "--mode=train") == 0
  said = capsys.readouterr().out
  assert "runs/sudoku_utm-smoke is already complete\ntrained: 3,447 par" in said
  there = "--workdir=runs/sudoku_utm-smoke"
  seed = "--config.run.seed=7"
  assert main(f"{BARE}:smoke", there, "--mode=eval", seed) == 2
  said = capsys.readouterr().err
  assert said == (
    "error: --config.run.seed=7 has no effect on a trained model; the run has"
    " 0\n"
  )


def test_a_run_is_scored_with_its_own_config(
  main, monkeypatch, tmp_path, capsys
):
  """Without --config, by both commands; changes of the command line count."""
  asked = []

  def scored(config, workdir, finish, limit):
    asked.append((workdir.as_posix(), config.model.width, config.eval, limit))
    return {"status": "diverged"}

  monkeypatch.setattr(score_lib, "score_model", scored)
  scoring = functools.partial(command, score.main, directory=tmp_path)
  config = config_lib.make("utm", "sudoku")
  config.model.width, config.eval.num_loops = 96, 7
  (tmp_path / "there").mkdir()
  there = config_lib.to_dict(config)
  workdir_lib.write_json(tmp_path / "there" / "config.json", there)
  (tmp_path / "own.csv").write_text("puzzle,solution\n")
  loops = "--config.eval.num_loops=24"
  assert scoring("there") == scoring("there", loops) == 3
  assert main("--workdir=there", "--mode=eval", loops) == 3
  assert {one[:2] for one in asked} == {("there", 96)}
  assert [one[2].num_loops for one in asked] == [7, 24, 24]
  assert scoring(BARE) == 3 and asked[-1][0] == "runs/sudoku_utm"
  assert scoring("zoo:depo", "--limit=5") == 3
  assert asked[-1][0] == "zoo:depo" and asked[-1][3] == 5
  capsys.readouterr()
  for arguments, said in (
    ([], "RUN is missing; expected a work directory, zoo:NAME or"),
    (["elsewhere"], "elsewhere contains no run: no such directory"),
    (["there", BARE], "--config has no effect with there"),
    (["there", "--workdir=a"], "--workdir has no effect with there"),
    (["there", "--config.eval.loops=2"], "unknown setting 'eval.loops'; did "),
    (["own.csv"], "own.csv: is not a model; expected a work directory"),
    (["zoo:nope"], "zoo:nope: no such model; expected one of "),
    (["zoo:depo", "--limit=-1"], "--limit=-1 must be at least 0"),
    (["zoo:depo", "--config.run.seed=5"], "--config.run.seed=5 has no effect"),
  ):
    assert scoring(*arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
  assert main("--workdir=there") == 2
  assert "--config=FILE is missing" in capsys.readouterr().err


def test_scoring_that_was_stopped_is_done_again(
  main, tmp_path, monkeypatch, capsys
):
  stopped = {"status": "preempted", "steps": 600}
  monkeypatch.setattr(score_lib, "score_model", lambda *_: stopped)
  assert command(score.main, "zoo:depo", directory=tmp_path) == 4
  said = capsys.readouterr().err
  assert "to score again, run:" in said and "resume" not in said


def test_a_run_that_was_stopped_says_how_to_go_on(main, monkeypatch, capsys):
  asked = []

  def run(config, workdir, mode, finish, extend, check):
    assert finish is figures.finish and check and not extend
    asked.append((config.task.box_cols, str(workdir), mode))
    return {"status": "preempted", "steps": 600}

  monkeypatch.setattr(train, "run", run)
  command = ["python", "-m", "loopjax.main", "--config=my configs/a.py"]
  monkeypatch.setattr(sys, "orig_argv", command)
  assert main(BARE) == 4
  assert asked == [(3, "runs/sudoku_utm", "train_and_eval")]
  said = capsys.readouterr()
  assert said.out.splitlines()[1].startswith("preset: tiny; others: ")
  assert said.err == (
    "stopped after step 600 of 2600; to resume, run:\n"
    "python -m loopjax.main '--config=my configs/a.py'\n"
  )


def test_too_little_memory_is_a_line_that_says_what_to_set(
  main, monkeypatch, capsys
):
  def run(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nat 0")

  monkeypatch.setattr(train, "run", run)
  assert main(BARE) == errors.ExitStatus.FAILED
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith("error: a device has too little memory (RESOURCE_EXH")
  for setting in ("loop.remat=", "run.num_microbatches", "loopjax fit"):
    assert setting in said


def test_without_a_config_it_says_how_to_find_one(capsys):
  assert command(main_lib.main) == 2
  missing = "error: --config=FILE is missing; --list shows the configs\n"
  assert capsys.readouterr() == ("", missing)
  assert command(main_lib.main, "--list") == 0
  said = capsys.readouterr().out
  assert said.startswith("loopjax train --config=FILE")
  assert "\nconfigs/sudoku_utm.py: " in said


def test_help_is_what_it_does_then_the_flags(capsys):
  with pytest.raises(SystemExit) as ended:
    main_lib.main(["--help"])
  assert not ended.value.code
  said = capsys.readouterr().out
  what, _, flags = said.partition("\noptions:\n")
  assert f"\n\n{main_lib.__doc__.strip()}\n" in what
  for flag in ("--config FILE", "--workdir DIR", "--mode", "--num_processes"):
    assert f"  {flag}" in flags


def test_a_config_may_be_a_word_of_its_own(capsys):
  flags = "--config", "sudoku_utm:smoke"
  assert command(describe.main, *flags) == 0
  said = capsys.readouterr().out
  assert said.startswith("model       utm on sudoku\nparameters  ")
  lines = said.splitlines()
  assert max(map(len, lines)) <= 80 and len(lines) < 50
  assert any(line.startswith("task        name=sudoku, ") for line in lines)


@pytest.mark.parametrize(
  ("config", "line"),
  [
    ("lm_recurrent:smoke", "  injection injection=linear, anchor_scale=1.0"),
    (
      "gsm_sleep:smoke",
      "  gradient  num_with_gradient=0, gradient_cut=hidden\n",
    ),
  ],
)
def test_settings_are_described_by_mechanism(config, line, capsys):
  assert command(describe.main, f"--config={config}") == 0
  said = capsys.readouterr().out
  assert f"\n{line}" in said
  for setting in ("num_with_gradient", "injection", "num_loops", "width"):
    assert said.count(f" {setting}=") == 1 + (setting == "num_loops")  # eval's.


def test_a_config_without_its_flag_is_suggested(capsys):
  assert command(main_lib.main, "sudoku_utm") == 2
  meant = "'sudoku_utm' is not a flag; did you mean --config=sudoku_utm?"
  assert meant in capsys.readouterr().err


def test_describe_says_how_large_a_cache_is(capsys):
  flag = f"--config={ROOT}/configs/lm_sleep.py:smoke"
  assert command(describe.main, flag, "--json") == 0
  described = json.loads(capsys.readouterr().out)
  sizes = {"token": 48_000, "row": 1024**2}
  page = describe_lib.page(
    described | {f"cache_bytes_per_{of}": size for of, size in sizes.items()}
  )
  assert "\ncache       48 kB per token, 1.05 MB per row\n" in page


def test_describe_prints_json_and_trains_nothing(tmp_path, capsys):
  flags = f"--config={ROOT}/configs/sudoku_utm.py:paper", "--json"
  assert command(describe.main, *flags, directory=tmp_path) == 0
  assert not [*tmp_path.iterdir()]
  assert command(describe.main, flags[0], "--workdir=a") == 2
  described = json.loads(capsys.readouterr().out)
  assert described["parameters"] == 3_177_612
  assert described["config"]["model"]["name"] == "utm"
  assert len(described["flops_per_example"]) == 18
  each = [flops / 81 for flops in described["flops_per_example"]]
  assert described["flops_per_token"] == each
  # Parameters, their average and two moments, and two counts of steps.
  assert described["state_bytes"] == 4 * (4 * 3_177_612 + 2)
  assert described["cache_bytes_per_token"] == 0


FULL_DISK = """
import errno, os, threading
from loopjax.commands import command_line
from loopjax.errors import leave, one_line_errors

def fill():
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

@one_line_errors
def main():
  with command_line.ending_when_full("--workdir=runs/full"):
    threads = [threading.Thread(target=fill) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    fill()

leave(main())
"""


READER = """
from loopjax.errors import leave, one_line_errors

@one_line_errors
def main():
  while True:
    print("a line", flush=True)

leave(main())
"""


def test_a_reader_that_goes_away_ends_the_command_with_one_line():
  with subprocess.Popen(
    [sys.executable, "-c", READER],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "a line\n"
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == "error: standard output was closed\n"


def test_what_the_terminal_cannot_encode_is_escaped(monkeypatch):
  """In ASCII a standard error; in UTF-8 a file name in Latin-1."""
  output = io.TextIOWrapper(io.BytesIO(), "ascii")
  monkeypatch.setattr(sys, "stdout", output)

  @errors.one_line_errors
  def main():
    print("0.2 \N{PLUS-MINUS SIGN} 0.004 \udcfc.txt")
    return 0

  assert main() == 0
  assert output.buffer.getvalue() == rb"0.2 \xb1 0.004 \udcfc.txt" + b"\n"


INTERRUPTED = """
from loopjax.errors import leave, one_line_errors

@one_line_errors
def main():
  print("a line", flush=True)
  while True:
    pass

leave(main())
"""


def test_ctrl_c_ends_the_command_without_a_traceback():
  """By its signal, as a sweep expects of a stopped item."""
  with subprocess.Popen(
    [sys.executable, "-c", INTERRUPTED],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "a line\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert process.stderr.read() == ""


def test_ctrl_c_ends_a_command_with_flags_of_its_own(capsys):
  @errors.one_line_errors
  def main():
    raise KeyboardInterrupt

  assert main() == 130
  assert capsys.readouterr() == ("\n", "")


@pytest.mark.parametrize(
  ("error", "said"),
  [
    (PermissionError(errno.EACCES, "Permission denied", "x"), "x: Permission"),
    (OSError(errno.ENOSPC, "No space left"), "a file: No space left"),
    (OSError(errno.EFBIG, "File too large", "x"), "x: File too large"),
    (OSError(errno.EMFILE, "Too many open files"), "a file: Too many open"),
  ],
)
def test_a_place_that_is_closed_is_one_line(error, said, capsys):
  @errors.one_line_errors
  def main():
    raise error

  assert main() == 2
  printed = capsys.readouterr().err
  assert printed.startswith(f"error: {said}") and printed.count("\n") == 1


def test_other_errors_of_the_system_are_our_own():
  @errors.one_line_errors
  def main():
    raise ConnectionResetError(errno.ECONNRESET, "reset")

  with pytest.raises(ConnectionResetError):
    main()


@pytest.mark.parametrize(
  ("error", "status", "waits"),
  [
    (processes.ProcessLostError("silent"), 5, True),
    (jax.errors.JaxRuntimeError("Gloo all-reduce: connection closed"), 5, True),
    (jax.errors.JaxRuntimeError("UNAVAILABLE: task 1 is silent"), 5, True),
    (
      jax.errors.JaxRuntimeError("INTERNAL: NCCL: remote process exited"),
      5,
      True,
    ),
    (jax.errors.JaxRuntimeError("INTERNAL: ptxas failed"), 1, False),
    (
      jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: NCCL: no memory"),
      1,
      False,
    ),
    (errors.UserError("file.txt, line 3: no number"), 2, False),
    (ZeroDivisionError("by zero"), 1, False),
  ],
)
def test_the_cause_ends_before_those_that_lost_it(
  error, status, waits, monkeypatch, capsys
):
  """Schedulers judge a run by the first of its processes that ends."""
  events = []
  monkeypatch.setattr(main_lib.time, "sleep", events.append)
  monkeypatch.setattr(main_lib.os, "_exit", events.append)
  main_lib._end_alone(error)
  assert events == [main_lib._SECONDS_AFTER_A_LOSS] * waits + [status]
  assert str(error).split(":")[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_disk_that_is_full_for_many_threads_is_one_line():
  done = subprocess.run(
    [sys.executable, "-c", FULL_DISK],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr == "error: --workdir=runs/full: No space left on device\n"


def test_a_full_disk_behind_the_output_is_not_the_runs():
  with open("/dev/full", "w", encoding="utf-8") as full:
    ended = subprocess.run(
      [sys.executable, "-c", FULL_DISK], stdout=full, stderr=subprocess.PIPE
    )
  said = b"error: standard output: No space left on device\n"
  assert (ended.returncode, ended.stderr) == (2, said)
