"""Stored results of runs, and the report committed with them."""

import contextlib
import errno
import pathlib
import re

import pytest
from report_examples import write_run
from tests_support import ROOT, load_config

from loopjax import config as config_lib
from loopjax import sections
from loopjax.errors import UserError
from loopjax.report import __main__ as report
from loopjax.report import grouping, keep, page, papers, tables
from loopjax.report import runs as runs_lib
from loopjax.run import provenance
from loopjax.run import workdir as workdir_lib


def make_run(folder, passes, seed, **more):
  """A complete run of Sleep; its score encodes passes and seed."""
  workdir = folder / f"n{passes}_s{seed}"
  config = load_config("automaton_sleep", "smoke")
  seeds = {"run.seed": seed, "task.eval_seed": seed}
  values = {"model.num_loops": passes, **seeds, **more}
  config_lib.override(config, values)
  summary = {
    "status": "completed",
    "metrics": {"train/loss": 1.0, "test/exact_match": passes + seed / 10},
    "parameters": 10, "steps": 20, "wall_seconds": 1.0, "devices": "1 x cpu",
    "versions": {}, "revision": "abc", "data": {"constant_floor": 0.0},
    "command": f"python -m loopjax.main --workdir={workdir}",
  }  # fmt: skip
  scores = {"loss": 1.5, "loss/standard_error": 0.1}
  rows = [
    {"step": 10, "split": "train", "loss": 2.0},
    {"step": 10, "split": "validation", **scores},
  ]
  return write_run(workdir, config_lib.to_dict(config), summary, rows)


@pytest.fixture(autouse=True)
def history(monkeypatch):
  """A checkout whose history has the commit of `make_run`."""
  monkeypatch.setattr(provenance, "has_landed", lambda commit: commit == "abc")


@pytest.fixture
def runs(tmp_path):
  folder = tmp_path / "tmp" / "here"
  return [make_run(folder, n, s) for n in (1, 4) for s in (1, 2, 3)]


def test_what_is_kept_is_a_sweep_whose_seeds_are_averaged(
  runs, tmp_path, capsys
):
  out = tmp_path / "kept" / "rule.runs.json"
  assert keep.main([*map(str, runs), f"--out={out}", "--sweep=passes"]) == 0
  assert capsys.readouterr().out.strip() == str(out)
  assert str(tmp_path) not in out.read_text()
  [plan], others = runs_lib.collect([out.parent])
  assert not others and plan.command == ""
  run = plan.runs[4]
  assert run.directory == tmp_path / "kept" / "rule" / "n4_s2"
  said = run.summary["command"]
  assert said == "python -m loopjax.main --workdir=runs/n4_s2"
  assert run.summary["metrics"] == {"test/exact_match": 4.2}
  assert run.rows == [{"step": 10, "split": "validation", "loss": 1.5}]
  groups = grouping.group_by_seed(plan.runs)
  assert [group.overrides for group in groups] == [
    {"model.num_loops": 1}, {"model.num_loops": 4},
  ]  # fmt: skip
  pages = page.write(runs_lib.collect([out.parent]), tmp_path / "report")
  markdown = pages[1].read_text()
  assert "<small>N = 4</small>" in markdown  # The paper's row.
  assert "420.0\u00a0±\u00a010.0" in markdown
  assert "loopjax.sweep" not in markdown


def test_a_report_averages_no_runs_of_different_files(runs, tmp_path):
  for run, content in zip(runs, "aabaaa", strict=True):
    summary = workdir_lib.read_summary(run)
    summary["data"]["train_sha256"] = content
    workdir_lib.write_json(run / "summary.json", summary)
  out = tmp_path / "kept" / "rule.runs.json"
  keep.keep(runs, out, sweep="passes")
  page.write(runs_lib.collect([out.parent]), tmp_path / "report")
  markdown = (tmp_path / "report" / "report.md").read_text()
  assert "115.0\u00a0±\u00a07.1" in markdown  # 1.1 and 1.2 in percent.
  assert "data\u00a0=\u00a0" in markdown


def test_results_of_analyses_are_kept(runs, tmp_path):
  """What a page says of a run's analyses is stored with the run."""
  command = "python -m loopjax.analysis.memory"
  (runs[0] / "figures").mkdir(exist_ok=True)
  workdir_lib.write_json(
    runs[0] / "figures" / "depth.json", {"command": f"{command} {runs[0]}"}
  )
  states = [{"step": 3, "kind": "intervention", "alpha": 1.0, "accuracy": 0.5}]
  (runs[0] / "analysis").mkdir()
  workdir_lib.write_json_lines(
    runs[0] / "analysis" / "analysis.jsonl", states * 2
  )
  out = tmp_path / "kept" / "rule.runs.json"
  keep.keep(runs[:2], out, "passes")
  first, second = workdir_lib.read_json(out)["items"]
  assert first["results"] == {
    "depth": {"command": f"{command} runs/{runs[0].name}"},
    "analysis": states * 2,
  }
  assert second["results"] == {}
  (runs[0] / "analysis" / "analysis.jsonl").write_text("{\n")
  with pytest.raises(UserError, match=r"analysis.jsonl:1: "):
    keep.keep(runs[:1], tmp_path / "damaged.runs.json", "passes")


def test_a_report_begins_with_the_verdicts(runs, tmp_path, capsys):
  """A table of questions that link to their numbers; a search is folded."""
  out = tmp_path / "kept"
  for name, kept in (("rule", runs), ("other", runs[:1])):
    keep.keep(kept, out / f"{name}.runs.json", "passes", f"Is it {name}?")
  keep.keep(runs, out / "rate.runs.json", "passes", "Which?", ("run.seed",))
  before = page.write(runs_lib.collect([out]), tmp_path / "report")[
    1
  ].read_text()
  assert "## Contents" in before and "## Verdicts" not in before
  path = out / "rule.runs.json"
  words = [f"--out={path}", "--sweep=passes", "--verdict=same direction"]
  assert keep.main(words) == 0  # Adds no runs.
  assert len(runs_lib.collect([out])[0][-1].runs) == len(runs)
  html, markdown, *_ = page.write(runs_lib.collect([out]), tmp_path / "report")
  lines = markdown.read_text().splitlines()
  assert lines[2] == "## Verdicts"
  for name, counts, verdict in (
    ("rule", "6 runs, 3 seeds", "same direction"),
    ("other", "1 run, 1 seed", "–"),
  ):
    link = f"[Is it {name}?](#is-it-{name}) <small>{counts}</small>"
    assert f"| {link} | {verdict} |" in lines
  assert '<h3 id="is-it-rule">Is it rule?</h3>' in html.read_text()
  assert "<summary>Search. Which?</summary>" in lines
  keep.keep(runs, path, "passes")  # It stays.
  assert '"verdict": "same direction"' in path.read_text()
  capsys.readouterr()
  assert keep.main([f"--out={out / 'new.runs.json'}", "--sweep=x"]) == 2
  assert "contains no runs, and no RUN" in capsys.readouterr().err
  assert keep.main([*words[:2], "--verdict=yes"]) == 2

  text = markdown.read_text()
  assert "\n### Is it rule?\n" in text and "Runs: rule, sweep passes." in text
  assert "| loops\u00a0=\u00a01 <small>N = 1</small> |" in text


def test_a_search_shows_the_score_that_chose(tmp_path):
  """Before the test's scores, with a mark for each number of passes."""
  rates = (0.1, 0.2)
  runs = [
    make_run(tmp_path / f"{rate}", n, s, **{"optim.learning_rate": rate})
    for rate in rates for n in (1, 4) for s in (1, 2)
  ]  # fmt: skip
  for number, run in enumerate(runs):
    summary = workdir_lib.read_json(run / "summary.json")
    # A slower rate is better with one pass, a faster one with four.
    score = (0.75, 0.25, 0.5, 0.875)[number // 2]
    summary["metrics"]["validation/exact_match"] = score
    workdir_lib.write_json(run / "summary.json", summary)
    renamed = run.with_name(f"{run.name}_{number}")
    run.rename(renamed)
    runs[number] = renamed
  out = tmp_path / "kept" / "rule.runs.json"
  common = [*map(str, runs), f"--out={out}", "--sweep=search"]
  assert keep.main([*common, "--chosen_for=model.num_loops"]) == 0
  assert keep.main(common) == 0  # Additions do not remove it.
  markdown = page.write(runs_lib.collect([out.parent]), tmp_path / "report")[
    1
  ].read_text()
  [header] = re.findall(r"\| setting \| ([^|]+) \| ([^|]+) \|", markdown)
  label = "all labels of an example right, %"
  assert header == (f"validation: {label}", label)
  chosen = re.findall(r"\n\| ([^|]+) \| [78]\S+, chosen <small>", markdown)
  plain = [text.replace("\u00a0", " ") for text in chosen]
  assert plain == [
    "loops = 1, learning rate = 0.1", "loops = 4, learning rate = 0.2"
  ]  # fmt: skip
  assert markdown.count("chosen <small>") == 2
  # One for all without a setting; none if runs are shown.
  for option, number in ((["--chosen_for="], 1), ([], 0)):
    other = tmp_path / f"kept_{number}" / "rule.runs.json"
    arguments = [*map(str, runs), f"--out={other}", "--sweep=search", *option]
    assert keep.main(arguments) == 0
    markdown = page.write(
      runs_lib.collect([other.parent]), tmp_path / "report"
    )[1].read_text()
    assert markdown.count("chosen <small>") == number
    assert ("| validation: " in markdown) == bool(number)


def test_a_search_by_loss_chooses_the_lowest():
  column = papers.Column("chosen_by", "", "validation/loss")
  sweep = papers.Sweep("", "", (column,))
  groups = [
    grouping.Group(
      {"x.y": value},
      [
        runs_lib.Run(
          None, {}, {"x.y": value}, "completed", {"run": {"seed": 0}},
          {"metrics": {"validation/loss": value}},
        )
      ],
    )
    for value in (3.0, 2.0)
  ]  # fmt: skip
  # Chosen of both; without alternatives, or a choice, there is none.
  for chosen_for, last in (
    ((), "2.0, chosen"),
    (("x.y",), "2.0"),
    (None, "2.0"),
  ):
    table, _ = tables.comparison(sweep, groups, None, chosen_for)
    rows = [row.split("|") for row in table.splitlines()[2:]]
    assert [row[2].strip() for row in rows] == ["3.0", last]


def test_runs_are_added_to_those_that_are_kept(runs, tmp_path):
  """Also the settings in which all runs differ."""
  one_by_one, at_once = tmp_path / "a.runs.json", tmp_path / "b.runs.json"
  for run in (*runs, runs[0]):
    keep.keep([run], one_by_one, "passes")
  keep.keep(runs, at_once, "passes")
  assert one_by_one.read_text() == at_once.read_text()
  with pytest.raises(UserError, match="its runs are of --sweep=passes"):
    keep.keep(runs, at_once, "seeds")
  summary = workdir_lib.read_json(runs[0] / "summary.json")
  summary["metrics"]["test/exact_match"] = 0.5
  workdir_lib.write_json(runs[0] / "summary.json", summary)
  with pytest.raises(UserError, match="another run has the name n1_s1"):
    keep.keep(runs, at_once, "passes")
  assert one_by_one.read_text() == at_once.read_text()
  # Without a sweep they stay by themselves. An evaluation is a line.
  alone = tmp_path / "alone" / "a.runs.json"
  keep.keep(runs[1:3], alone)
  plans, others = runs_lib.collect([alone.parent])
  names = {run.directory.name for run in others if run.kept}
  assert not plans and names == {"n1_s2", "n1_s3"}
  lines = [line.strip() for line in alone.read_text().splitlines()]
  evaluation = '{"step": 10, "split": "validation", "loss": 1.5}'
  assert lines.count(evaluation) == 2 and max(map(len, lines)) < 1500


def test_what_cannot_be_kept_is_one_line(runs, tmp_path, refusal):
  elsewhere = make_run(
    tmp_path / "b", 1, 1, **{"run.init_from": "/home/me/runs/x"}
  )
  twin = make_run(tmp_path / "c", 1, 1, **{"run.num_steps": 30})
  broken, unfinished, foreign = (
    make_run(tmp_path / "d", 1, seed) for seed in (7, 8, 9)
  )
  workdir_lib.write_json(broken / "summary.json", {"status": "diverged"})
  (unfinished / "summary.json").unlink()
  workdir_lib.write_json(foreign / "summary.json", {"status": "completed"})
  out = tmp_path / "kept" / "a.runs.json"
  for workdirs, message in (
    ([elsewhere], "contains the path /home/me/runs/x, which others"),
    ([runs[0], twin], "another run has the name n1_s1"),
    ([broken], "the run is not complete"),
    ([unfinished], "the run is not complete"),
    ([foreign], "summary.json: was not written by loopjax"),
    ([tmp_path], "contains no run: config.json is missing"),
    (["zoo:novels"], "zoo:novels is a trained model, not a run"),
    ([runs[0], "--chosen_for="], "--chosen_for has no effect without --sweep"),
    ([runs[0], "--verdict=not here"], "--verdict has no effect"),
    ([runs[0], "--title=x"], "--title has no effect without --sweep"),
    (
      [runs[0], "--sweep=x", "--chosen_for=model.num_lops"],
      "unknown setting 'model.num_lops'; did you mean model.num_loops",
    ),
  ):
    arguments = [*map(str, workdirs), f"--out={out}"]
    assert message in refusal(keep.main, arguments)
    assert not out.parent.exists()
  with pytest.raises(UserError, match="must end with .runs.json"):
    keep.keep(runs, tmp_path / "kept")
  with pytest.raises(UserError, match="cannot be written"):
    keep.keep(runs, runs[0] / "config.json" / "a.runs.json")
  other = tmp_path / "b.runs.json"
  for content in ({"items": 3}, {"items": [3], "sweep": ""}, {"sweep": ""}):
    workdir_lib.write_json(other, content)
    with pytest.raises(UserError, match="is not a list of runs"):
      keep.keep(runs, other)
  said = refusal(report.main, [str(other), f"--out={tmp_path / 'page'}"])
  assert "b.runs.json: is not a list of runs: has no 'items'" in said
  said = refusal(report.main, [str(other)])
  assert "b.runs.json: is a file; --out=FOLDER is required" in said


def test_a_run_of_an_unknown_revision_is_refused(
  runs, tmp_path, capsys, monkeypatch
):
  out = tmp_path / "a.runs.json"
  summary = workdir_lib.read_json(runs[0] / "summary.json")
  for revision in ("abd", "abc-dirty", ""):
    changed = summary | {"revision": revision}
    workdir_lib.write_json(runs[0] / "summary.json", changed)
    assert keep.main([str(runs[0]), f"--out={out}"]) == 2
    error = capsys.readouterr().err
    assert f"its revision '{revision}' is not in the history" in error
    assert not out.exists()
  monkeypatch.setattr(provenance, "has_landed", lambda _: None)  # No checkout.
  assert keep.main([str(runs[0]), f"--out={out}"]) == 0


def test_a_folder_of_this_machine_is_renamed(tmp_path, capsys):
  """Also in the name of the score of a source of text: its file's path."""
  workdir = make_run(tmp_path / "b", 1, 1, **{"run.init_from": "/mnt/data/x"})
  score = "bits_per_byte/source=/mnt/data/a.txt"
  summary = workdir_lib.read_summary(workdir)
  summary["metrics"][f"test/{score}"] = 2.5
  workdir_lib.write_json(workdir / "summary.json", summary)
  row = {"step": 20, "split": "test", score: 2.5}
  workdir_lib.write_json_lines(workdir / "metrics.jsonl", [row])
  out = tmp_path / "a.runs.json"
  words = [str(workdir), f"--out={out}"]
  for more, said in (([], "/mnt/data/x"), (["--rename=/mnt"], "FOLDER=NAME")):
    assert keep.main([*words, *more]) == 2
    assert said in capsys.readouterr().err and not out.exists()
  assert keep.main([*words, "--rename=/mnt/data=books"]) == 0
  (item,) = workdir_lib.read_json(out)["items"]
  assert item["config"]["run"]["init_from"] == "books/x"
  assert item["summary"]["metrics"]["test/bits_per_byte/source=books/a.txt"]
  assert item["evaluations"][0]["bits_per_byte/source=books/a.txt"] == 2.5
  assert "/mnt" not in out.read_text()


def test_only_whole_paths_are_renamed(tmp_path, monkeypatch):
  """Not the "bias" of a setting, if runs are in a folder of that name."""
  files = {"run.init_from": "/data/books_2/x,/data/books"}
  workdir = make_run(tmp_path / "bias", 1, 1, **files)
  summary = workdir_lib.read_summary(workdir)
  command = "--model.router_bias=0 old/bias/x -I/data/books. --workdir=bias/one"
  workdir_lib.write_json(
    workdir / "summary.json", summary | {"command": command}
  )
  monkeypatch.chdir(tmp_path)
  relative = pathlib.Path("bias", workdir.name)
  keep.keep(
    [relative], tmp_path / "a.runs.json", rename={"/data/books": "books"}
  )
  text = (tmp_path / "a.runs.json").read_text()
  assert (
    "--model.router_bias=0 old/bias/x -Ibooks. --workdir=runs/one"
  ) in text
  assert "/data/books_2/x,books" in text


def test_a_write_that_fails_leaves_what_was_kept(runs, tmp_path, monkeypatch):
  out = tmp_path / "a.runs.json"
  keep.keep(runs[:1], out)
  before = out.read_text()

  def full(path, text, *_, **__):
    path.write_bytes(text[:10].encode())
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(pathlib.Path, "write_text", full)
  with pytest.raises(UserError, match="cannot be written: No space left"):
    keep.keep(runs, out)
  assert out.read_text() == before


@pytest.mark.long
def test_the_committed_report_is_of_the_committed_runs(tmp_path):
  committed = ROOT / "benchmarks" / "report"
  with contextlib.chdir(ROOT):
    assert report.main(["benchmarks/runs", f"--out={tmp_path}"]) == 0
  for name in ("report.csv", "papers.csv", "report.md"):
    made = (tmp_path / name).read_text()
    assert made == (committed / name).read_text(), (
      "python -m loopjax.report benchmarks/runs --out=benchmarks/report"
    )
  pictures = {path.name for path in (tmp_path / "report_figures").iterdir()}
  there = {path.name for path in (committed / "report_figures").iterdir()}
  assert pictures == there
  assert "not complete" not in made and "incomplete" not in made


# Settings that left, but whose runs are kept.
LEFT = dict.fromkeys(
  ["model.sweeps", "model.chunk_jitter", "model.history_reach"]
)


def test_kept_runs_have_no_unknown_settings():
  plans, others = runs_lib.collect([ROOT / "benchmarks" / "runs"])
  runs = [run for plan in plans for run in plan.runs] + others
  assert runs
  for run in runs:
    model, task = (run.config[x]["name"] for x in ("model", "task"))
    if task == "knowledge":
      continue  # It left; its runs are kept.
    known = sections.flatten(config_lib.make(model, task))
    known |= LEFT
    for values in (sections.flatten(run.config), run.overrides, run.settings):
      assert set(values) <= set(known), run.directory
