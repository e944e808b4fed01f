"""Every command ends a user error with one line and exit status 2.

Commands that need a run are tested with their other tests.
"""

import functools
import importlib
import pathlib

import pytest
from tests_support import command

SUDOKU = "--config=configs/sudoku_utm.py:smoke"
FIT = (SUDOKU, "--topology=cpu:2")
# By command; some use configs/, the others run in an empty folder.
OF_CONFIGS = ("main", "fit", "sweep")
MISTAKES = {
  "main": [
    ([], "--config=FILE is missing"),
    (["--config=configs/nothing.py"], "no such file: configs/nothing.py"),
    (["--config=configs/sudoko_utm.py"], "did you mean 'sudoku_utm.py'?"),
    (["--config=configs/sudoku_utm.py:huge"], "error: unknown preset 'huge'"),
    (
      [f"{SUDOKU},model.widht=3"],
      "error: unknown setting 'model.widht'; did you mean model.width",
    ),
    (
      [SUDOKU, "--config.model.witdh=3"],
      "error: unknown setting 'model.witdh'; did you mean model.width",
    ),
    ([SUDOKU, "--config.model.width=wide"], "wide"),
    ([SUDOKU, "--mode=dance"], "dance"),
    (["--config=README.md"], "README.md is not a Python file"),
    (["--config", "configs/nothing.py"], "no such file: configs/nothing.py"),
    (["--config"], "--config needs a FILE"),
    ([SUDOKU, "--workdir="], "is empty"),
    (
      [SUDOKU, "--config.run.seed=4294967296"],
      "run.seed=4294967296 must be less than 2**32",
    ),
    (
      [SUDOKU, "--config.eval.num_loops=99999"],
      "eval.num_loops=99999: 99999 loops exceed the maximum of 65,536",
    ),
    (
      [SUDOKU, "--workdir=zoo:sudoku_6x6"],
      "zoo:sudoku_6x6 is a trained model, not a run; `loopjax score zoo:sudo",
    ),
    (["--konfig=x"], "konfig"),
    ([SUDOKU, "mode=eval"], "'mode=eval'"),
  ],
  "fit": [
    ([], "arguments are required: --config=FILE, --topology=NAME"),
    ([SUDOKU], "arguments are required: --topology=NAME"),
    ([SUDOKU, "--topology=v5e:16"], "v5e takes 2 size(s)"),
    ([*FIT, "--memory_gib=-1"], "memory_gib"),
    ([*FIT, "--workdir=x"], "--workdir has no effect"),
    ([*FIT, "--generate"], "unknown flag '--generate'"),
  ],
  "sweep": [
    ([SUDOKU, "--config=configs/nothing.py"], "configs/nothing.py"),
    ([], "--config=FILE is missing"),
    ([SUDOKU], "available: memory_curve, "),
    (
      [SUDOKU, "--sweep=depht", "--workdir=x"],
      "no such sweep; expected one of ablation, depth, fixed_depth",
      "width; did you mean 'depth'?",
    ),
    ([SUDOKU, "--sweep=depth", "--workdir=setup.cfg/x"], "cannot be written"),
    (
      [SUDOKU, "--sweep=depth", "--workdir=x", "--item=3"],
      "--item=3: sweep depth has 3 items, counted from 0",
    ),
    (
      [SUDOKU, "--sweep=depth", "--count", "--item=0"],
      "--item has no effect with --count",
    ),
    *(
      (
        [
          "--config=configs/gsm_sleep.py:smoke,model.name=looped",
          *sweep,
        ],
        "sweeps do not support", "model.name='looped'", "which lacks window\n",
      )
      for sweep in ([], ["--sweep=passes", "--dry_run"])
    ),
  ],
  "generate": [
    (["zoo:novels", "--num_tokens=5"], "did you mean '--max_new_tokens'?"),
  ],
  "serve": [
    ([], "RUN"),
    (["a", "--dtype=float32"], "--dtype=float32 has no effect"),
    (["--slots=0", "a"], "--slots=0 must be at least 1"),
    (["a", "--port=99999"], "--port=99999"),
    (["a", "--prefill_loops=-1"], "--prefill_loops=-1 must be at least 0"),
    (["a", "--allowed_hosts=*.b.org"], "--allowed_hosts=*.b.org is not a name"),
    (["a", "--cors=b.org"], "--cors=b.org is not an origin"),
    (["a", "--host=0.0.0.0"], "give --token_file=FILE"),
    (["a", "--token_file=none"], "cannot be read"),
    (["a", "--token_file=short"], "at least 16 characters"),
    (["missing", "--port=0"], "missing contains no run"),
    (["a/x", "--also=b/x", "--port=0"], "are named 'x'; --name names"),
    (["a", "--also=missing", "--port=0"], "contains no run"),
    (["a", "--colour=red"], "unknown flag '--colour'"),
  ],
  "report": [
    (["none"], "no such directory"),
    (["."], "contains no run and no sweep"),
  ],
  "hub": [
    ([], "command"),
    (["import", "missing", "run"], "missing"),
    (["push", "x"], "OWNER/NAME"),
    (["push", "missing", "me/model"], "missing"),
    (["card", "missing", "out"], "missing"),
    (["export", "missing", "out", "--layout=ouro"], "missing"),
    (["export", "missing", "out", "--layout=gpt2"], "gpt2"),
    (["export", "--layot=ouro"], "unknown flag '--layot'; did you mean"),
    (["export", "--workdir", "a"], "loopjax hub export RUN"),
    (["push", "--workdir=a"], "unknown flag '--workdir'"),
  ],
  "play": [
    (["--promt=It was"], "unknown flag '--promt'; did you mean '--prompt'?"),
    (["a", "--prom", "b"], "unknown flag '--prom'; did you mean '--prompt'?"),
    (["a", "--prompt=b\n", "--dance"], "unknown flag '--dance'"),
    (["a", "--prompt", "--what is it"], "a contains no run: "),
  ],
}  # fmt: skip


@pytest.mark.parametrize(
  ("name", "arguments", "said"),
  [
    (name, arguments, said)
    for name, rows in MISTAKES.items()
    for arguments, *said in rows
  ],
)
def test_mistakes_are_one_line(
  name, arguments, said, tmp_path, monkeypatch, refusal
):
  if name == "serve":
    for package in ("uvicorn", "starlette", "prometheus_client"):
      pytest.importorskip(package)
  module = "main" if name == "main" else f"{name}.__main__"
  main = importlib.import_module(f"loopjax.{module}").main
  if name in OF_CONFIGS:
    run = functools.partial(command, main)
    error = refusal(run, *arguments, said=name == "sweep")
  else:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("short").write_text("secret\n")
    error = refusal(main, arguments)
  assert all(text in error for text in said)
