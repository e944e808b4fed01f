"""What is kept of runs, and the report that is committed with it."""

import contextlib
import json

import pytest
from tests_support import ROOT, load_config

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.report import __main__ as report
from loopjax.report import keep, page, tables
from loopjax.run import workdir as workdir_lib


def make_run(folder, passes, seed, **more):
  """A complete run of Sleep; its score is passes and seed."""
  workdir = folder / f"n{passes}_s{seed}"
  workdir.mkdir(parents=True)
  config = load_config("automaton_sleep", "smoke")
  values = {"model.num_passes": passes, "run.seed": seed, **more}
  config_lib.override(config, values)
  workdir_lib.write_json(workdir / "config.json", config_lib.to_dict(config))
  summary = {
    "status": "completed",
    "metrics": {"train/loss": 1.0, "test/exact_match": passes + seed / 10},
    "parameters": 10, "steps": 20, "wall_seconds": 1.0, "devices": "1 x cpu",
    "versions": {}, "revision": "", "data": {"constant_floor": 0.0},
    "command": f"python -m loopjax.main --workdir={workdir}",
  }  # fmt: skip
  workdir_lib.write_json(workdir / "summary.json", summary)
  rows = [
    {"step": 10, "split": "train", "loss": 2.0},
    {
      "step": 10,
      "split": "validation",
      "loss": 1.5,
      "loss/standard_error": 0.1,
    },
  ]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines)
  return workdir


@pytest.fixture
def runs(tmp_path):
  folder = tmp_path / "tmp" / "here"
  return [make_run(folder, n, s) for n in (1, 4) for s in (1, 2, 3)]


def test_what_is_kept_is_a_sweep_whose_seeds_are_averaged(
  runs, tmp_path, capsys
):
  out = tmp_path / "kept"
  assert keep.main([*map(str, runs), f"--out={out}", "--sweep=passes"]) == 0
  assert capsys.readouterr().out.strip() == str(out)
  text = "".join(p.read_text() for p in out.rglob("*.json*"))
  assert str(tmp_path) not in text
  summary = workdir_lib.read_json(out / "n4_s2" / "summary.json")
  assert summary["command"] == "python -m loopjax.main --workdir=runs/n4_s2"
  assert summary["metrics"] == {"test/exact_match": 4.2}
  assert workdir_lib.read_metrics(out / "n4_s2") == [
    {"step": 10, "split": "validation", "loss": 1.5}
  ]
  [plan], others = tables.collect([out])
  assert not others and plan.command == ""
  groups = tables.group_by_seed(plan.runs)
  assert [group.overrides for group in groups] == [
    {"model.num_passes": 1}, {"model.num_passes": 4},
  ]  # fmt: skip
  markdown = page.write([out], tmp_path / "report")[1].read_text()
  assert "<small>N = 4</small>" in markdown  # The paper's row.
  assert "420.0\u00a0±\u00a010.0" in markdown
  assert "loopjax.sweep" not in markdown


def test_runs_of_no_sweep_stay_by_themselves(runs, tmp_path):
  keep.keep(runs[:2], tmp_path / "kept")
  plans, others = tables.collect([tmp_path / "kept"])
  assert not plans and len(others) == 2


def test_what_cannot_be_kept_is_one_line(runs, tmp_path, capsys):
  elsewhere = make_run(
    tmp_path / "b", 1, 1, **{"run.init_from": "/home/me/runs/x"}
  )
  twin = make_run(tmp_path / "c", 1, 1)
  broken = make_run(tmp_path / "d", 1, 9)
  workdir_lib.write_json(broken / "summary.json", {"status": "diverged"})
  out = tmp_path / "kept"
  for workdirs, message in (
    ([elsewhere], "names /home/me/runs/x, which others do not have"),
    ([runs[0], twin], "two of the runs have the same name"),
    ([broken], "the run is not complete"),
    ([tmp_path], "config.json"),
  ):
    assert keep.main([*map(str, workdirs), f"--out={out}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists()
  with pytest.raises(UserError, match="cannot be written"):
    keep.keep(runs, runs[0] / "config.json")


def test_the_committed_report_is_of_the_committed_runs(tmp_path):
  committed = ROOT / "benchmarks" / "report"
  with contextlib.chdir(ROOT):
    assert report.main(["benchmarks/runs", f"--out={tmp_path}"]) == 0
  for name in ("report.md", "report.csv"):
    made = (tmp_path / name).read_text()
    assert made == (committed / name).read_text(), (
      "python -m loopjax.report benchmarks/runs --out=benchmarks/report"
    )
  pictures = {path.name for path in (tmp_path / "report_figures").iterdir()}
  there = {path.name for path in (committed / "report_figures").iterdir()}
  assert pictures == there
  assert "not complete" not in made and "incomplete" not in made
