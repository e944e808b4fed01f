"""The command from work directories to tables and files."""

import json
import os
import shutil
import sys

import pytest
from eval_examples import choices, make_run, texts, write

from loopjax.eval import __main__ as entry
from loopjax.run import workdir as workdir_lib


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Request files."""
  folder = tmp_path_factory.mktemp("tasks")
  write(folder / "sums.jsonl.gz", choices(6))
  write(folder / "boxes.jsonl.gz", texts(5))
  return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two untrained runs with different seeds."""
  folder = tmp_path_factory.mktemp("runs")
  return [make_run(folder / name, run__seed=i) for i, name in enumerate("ab")]


def evaluate(*arguments):
  return entry.main([str(argument) for argument in arguments])


def test_scores_are_printed_and_written(runs, folder, capsys):
  status = evaluate(runs[0], "--tasks=sums,boxes", f"--folder={folder}")
  assert status == 0
  said = capsys.readouterr().out
  header, *rows = said.splitlines()[-3:]
  assert "bits/byte" in header and "accuracy" in header and "greedy" in header
  assert [row.split()[1:3] for row in rows] == [["sums", "6"], ["boxes", "5"]]
  sums = workdir_lib.read_json(runs[0] / "eval" / "sums.json")
  assert set(sums["metrics"]) >= {"bits_per_byte", "accuracy_per_char", "n"}
  assert f"{sums['metrics']['bits_per_byte']:.4f}" in rows[0]
  assert sums["counts"] == {
    "continuations": 18, "with_a_cut_context": 18, "in_parts": 0
  }  # fmt: skip
  boxes = workdir_lib.read_json(runs[0] / "eval" / "boxes.json")
  assert boxes["counts"] == {
    "continuations": 5, "with_a_cut_context": 5, "in_parts": 2
  }  # fmt: skip
  lines = (runs[0] / "eval" / "sums.items.jsonl").read_text().splitlines()
  assert len(lines) == 18
  gold = [json.loads(line) for line in lines if json.loads(line)["gold"]]
  assert [row["idx"] for row in gold] == [n % 3 for n in range(6)]


def test_what_a_score_depends_on_is_recorded(runs, folder):
  flags = ("--limit=2", "--num_loops=3", "--zero_shot", f"--folder={folder}")
  assert evaluate(runs[0], "--tasks=sums", *flags) == 0
  name = "sums_0shot_local,limit=2,num_loops=3.json"
  result = workdir_lib.read_json(runs[0] / "eval" / name)
  expected = {
    "task": "sums_0shot_local", "limit": 2, "num_fewshot": 0, "num_loops": 3,
    "trained_num_loops": 2, "tokenizer": "bytes", "context_length": 48,
    "chat_template": None, "step": 0, "model": "looped",
    "exit": {"execution": "scan", "threshold": None},
  }  # fmt: skip
  assert {key: result[key] for key in expected} == expected
  assert result["metrics"]["n"] == 2
  assert result["counts"] == {
    "continuations": 6, "with_a_cut_context": 2, "in_parts": 0
  }  # fmt: skip
  assert len(result["sha256"]) == 64 and result["versions"]["jax"]


def test_loops_change_the_scores(runs, folder):
  scores = []
  for loops in (1, 2):
    flags = (f"--num_loops={loops}", f"--folder={folder}")
    assert evaluate(runs[1], "--tasks=boxes", *flags) == 0
    path = runs[1] / "eval" / f"boxes,num_loops={loops}.json"
    scores.append(workdir_lib.read_json(path)["metrics"]["bits_per_byte"])
  assert abs(scores[0] - scores[1]) > 1e-3
  # The trained number is the default.
  assert evaluate(runs[1], "--tasks=boxes", f"--folder={folder}") == 0
  result = workdir_lib.read_json(runs[1] / "eval" / "boxes.json")
  assert result["metrics"]["bits_per_byte"] == pytest.approx(scores[1])


def test_two_runs_are_compared(runs, folder, capsys):
  flags = ("--tasks=sums", f"--folder={folder}", f"--compare={runs[1]}")
  assert evaluate(runs[0], *flags) == 0
  table, _, differences = capsys.readouterr().out.partition(
    f"{runs[0]} - {runs[1]}"
  )
  metrics = [
    workdir_lib.read_json(run / "eval" / "sums.json")["metrics"] for run in runs
  ]
  ours, theirs = (each["bits_per_byte"] for each in metrics)
  assert str(runs[1]) in table
  (line,) = [
    line
    for line in differences.splitlines()
    if line.startswith("sums") and " bits_per_byte " in line
  ]
  assert f"{ours - theirs:+.4f}" in line and abs(ours - theirs) > 1e-4
  assert evaluate(runs[0], *flags, "--limit=5") == 0
  *_, line = capsys.readouterr().out.splitlines()
  assert line.endswith("too few items")  # Five of one sign are one in 16.


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--tasks=nothing"], "--tasks=nothing: no such file or task; "),
    ([], "--tasks is empty"),
    (["--tasks=sums", "--limit=-1"], "--limit=-1 must be at least 0"),
    (["--tasks=sums", "--num_loops=0"], "--num_loops=0 must be at least 1"),
    (
      ["--tasks=sums", "--exit_threshold=0.5"],
      "looped exits early only in gen",
    ),
    (["--tasks=sums", "--checkpoint=7"], "no checkpoint at step 7"),
    (["--tasks=sums", "--dance"], "unknown flag '--dance'"),
    (["--tasks=sums", "--compare=nowhere"], "nowhere contains no run"),
  ],
)
def test_a_mistake_is_one_line(runs, folder, refusal, flags, message):
  flags = (runs[0], f"--folder={folder}", *flags)
  assert message in refusal(evaluate, *flags, said=True)


def test_a_transformer_has_no_more_loops(tmp_path, folder, capsys):
  settings = {"model__num_loops": 2, "eval__depth_factor": 0}
  run = make_run(tmp_path / "t", "transformer", **settings)
  flags = ("--tasks=sums", f"--folder={folder}", "--num_loops=3")
  assert evaluate(run, *flags) == 2
  assert "--num_loops=3: num_loops=3 must be 1 to 2" in capsys.readouterr().err
  assert not (run / "eval").exists()


def test_a_run_that_is_no_language_model(tmp_path, folder, capsys):
  sections = {
    "model": {"name": "utm"},
    "task": {"name": "sudoku"},
    "run": {"num_steps": 2000},
  }
  (tmp_path / "config.json").write_text(json.dumps(sections))
  assert evaluate(tmp_path, "--tasks=sums", f"--folder={folder}") == 2
  assert (
    "task.name='sudoku' is not 'text'; `loopjax report"
    in capsys.readouterr().err
  )


def test_two_tasks_have_two_names(runs, folder, tmp_path, refusal):
  other = write(tmp_path / "boxes.jsonl.gz", texts(2))
  flags = (f"--tasks=sums,boxes,{other}", f"--folder={folder}")
  error = refusal(evaluate, runs[0], *flags, said=True)
  assert error.startswith(f"error: --tasks: {folder / 'boxes.jsonl.gz'} and")
  assert f"{other} have the same name, 'boxes'" in error


def test_a_name_has_the_flags_that_are_given(runs, folder):
  flags = (f"--folder={folder}", "--checkpoint=0", "--limit=0")
  assert evaluate(runs[0], "--tasks=boxes", *flags) == 0
  assert (runs[0] / "eval" / "boxes,checkpoint=0.json").exists()
  options = entry.Options([], "", None, None, 0, False, None, 0.0, 3, None, 1)
  assert entry._file_name("a", options) == "a,exit_threshold=0.0,checkpoint=3"
  # Other settings have their own file; a zero-shot task has another name, and
  # other flags change no score.
  other = {
    "limit": 3, "num_loops": 3, "exit_threshold": 0.5, "checkpoint": 4,
    "bos": "none",
  }  # fmt: skip
  alike = {"workdirs", "tasks", "folder", "compare", "batch_tokens"}
  assert {*entry.Options._fields} == {*other, *alike, "zero_shot"}
  names = [
    entry._file_name("a", options._replace(**{name: value}))
    for name, value in other.items()
  ]
  assert len({*names, entry._file_name("a", options)}) == 6


def test_results_are_written_before_they_are_printed(
  runs, folder, tmp_path, monkeypatch
):
  """Including the second run's, even if standard output is closed."""
  copies = [
    shutil.copytree(run, tmp_path / run.name, ignore=lambda *_: ["eval"])
    for run in runs
  ]

  class Closed:
    def write(self, text):
      raise BrokenPipeError

  monkeypatch.setattr(sys, "stdout", Closed())
  monkeypatch.setattr(os, "_exit", sys.exit)
  with pytest.raises(SystemExit):
    evaluate(*copies, "--tasks=boxes", f"--folder={folder}")
  for run in copies:
    assert (run / "eval" / "boxes.json").exists()
    assert (run / "eval" / "boxes.items.jsonl").exists()


def test_what_cannot_be_written_is_one_line(runs, folder, tmp_path, capsys):
  """Fails before scoring."""
  run = shutil.copytree(runs[0], tmp_path / "run")
  shutil.rmtree(run / "eval", ignore_errors=True)
  (run / "eval").write_text("no directory")
  assert evaluate(run, "--tasks=sums", f"--folder={folder}") == 2
  said = capsys.readouterr()
  assert said.err == f"error: {run / 'eval'}: cannot be written: File exists\n"
  assert "padding" not in said.out
