"""Tables of any runs: which runs, rows, columns and numbers they have."""

import csv
import json
import math
import statistics

import pytest
from report_examples import write_run
from tests_support import load_config

import loopjax
from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.report import grouping, plots, records, table
from loopjax.run import workdir as workdir_lib

SCORES = {"test/exact_match": 0.5, "test/loss": 1.0, "train/loss": 0.25}


def make_run(workdir, status="completed", metrics=None, **changes):
  """A run of Sleep; settings are named as `model__num_loops`."""
  config = load_config("automaton_sleep", "smoke")
  named = {key.replace("__", "."): value for key, value in changes.items()}
  config_lib.override(config, named)
  summary = {
    "status": status, "metrics": metrics or SCORES, "steps": 20,
    "parameters": 10, "wall_seconds": 1.5,
  }  # fmt: skip
  ended = summary if status != "running" else None
  return write_run(workdir, config_lib.to_dict(config), ended)


def score_of(passes, seed):
  return passes + seed / 8


@pytest.fixture
def runs(tmp_path):
  """Two numbers of passes with three seeds each, another width with one."""
  folder = tmp_path / "runs"
  for passes in (1, 4):
    for seed in (0, 1, 2):
      score = {"test/exact_match": score_of(passes, seed), "test/loss": 0.5}
      score |= {"test/exact_match/standard_error": 0.1}
      score |= {f"depth/loss/loop={k}": k / 4 for k in range(3)}
      make_run(
        folder / f"n{passes}-s{seed}",
        metrics=score,
        model__num_loops=passes,
        run__seed=seed,
        task__eval_seed=seed,
      )
  return folder


def shown(capsys, *arguments):
  assert table.main([*map(str, arguments)]) == 0
  return capsys.readouterr()


def test_a_row_per_run_with_what_differs(runs, tmp_path):
  """Metrics are names or patterns; a setting of one family is left out."""
  found = loopjax.table(runs)
  assert len(found) == 6
  scores = {"test/exact_match": 4.125, "test/loss": 0.5}
  assert found[4] == {
    "run": (runs / "n4-s1").as_posix(), "state": "completed",
    "model.num_loops": 4, "task.eval_seed": 1, "run.seed": 1, **scores,
    "steps": 20, "parameters": 10, "wall_seconds": 1.5,
  }  # fmt: skip
  assert {tuple(row) for row in found} == {tuple(found[0])}
  names = ["depth/loss/loop=*", "test/loss"]
  (row,) = loopjax.table([runs / "n1-s0"], names)
  assert list(row.items())[2:] == [
    *((f"depth/loss/loop={k}", k / 4) for k in range(3)), ("test/loss", 0.5),
  ]  # fmt: skip
  for options, said in (
    ({"rows": ["run.sed"]}, "unknown setting 'run.sed'"),
    ({"metrics": "test/exact_mach"}, "did you mean 'test/exact_match'?"),
  ):
    with pytest.raises(UserError, match=said):
      loopjax.table(runs, **options)
  for name, more in (("a", {}), ("b", {"run__batch_size": 8})):
    make_run(tmp_path / "two" / name, **more)
  config = workdir_lib.read_json(tmp_path / "two" / "b" / "config.json")
  del config["model"]["num_loops"]
  config["model"]["name"] = "other"
  workdir_lib.write_json(tmp_path / "two" / "b" / "config.json", config)
  row = loopjax.table(tmp_path / "two", "test/loss")[1]
  assert [*row][2:] == ["model.name", "run.batch_size", "test/loss"]
  one, other = loopjax.table(tmp_path / "two", rows="model.num_loops")
  assert one["model.num_loops"] and other["model.num_loops"] is None


def test_of_runs_with_one_seed_one_may_be_done(tmp_path):
  make_run(tmp_path / "a")
  make_run(tmp_path / "b", "running")
  options = {"metrics": "test/loss", "rows": "model.num_loops"}
  (row,) = loopjax.table(tmp_path, **options)
  assert row["test/loss"] == 1.0
  make_run(tmp_path / "c")
  with pytest.raises(UserError, match="settings and the same seed; leave one"):
    loopjax.table(tmp_path, **options)


def test_seeds_are_averaged_with_students_interval(runs):
  """By hand: t is 4.302653 for three seeds, 12.706205 for two."""
  numbers = [score_of(4, seed) for seed in range(3)]
  two = loopjax.table(
    [runs / "n4-s0", runs / "n4-s1"], "test/exact_match", rows="run.num_steps"
  )
  three = loopjax.table(runs, "test/exact_match", rows="model.num_loops")[1]
  for (row, count), t in (((three, 3), 4.302653), ((two[0], 2), 12.706205)):
    some = numbers[:count]
    half = t * statistics.stdev(some) / math.sqrt(count)
    assert row["test/exact_match"] == pytest.approx(statistics.mean(some))
    assert row["test/exact_match/interval"] == pytest.approx(half, rel=1e-6)
    assert row["test/exact_match/runs"] == count
  assert three["model.num_loops"] == 4
  assert grouping.Spread({"0": 1.0}).interval is None


def test_each_seed_has_a_column_and_their_mean(runs):
  """The rows are what else differs; seeds are in order."""
  (runs / "n1-s0").rename(runs / "z")  # The first seed is read last.
  found = loopjax.table(runs, "test/exact_match", columns="run.seed")
  assert [row["model.num_loops"] for row in found] == [1, 4]
  assert list(found[0]) == [
    "model.num_loops",
    *(f"test/exact_match, run.seed={seed}" for seed in (0, 1, 2)),
    *("test/exact_match", "test/exact_match/interval", "test/exact_match/runs"),
  ]
  assert list(found[1].values())[1:4] == [
    score_of(4, seed) for seed in range(3)
  ]
  assert found[0]["test/exact_match"] == pytest.approx(1.125)

  both = ["model.num_loops", "run.seed"]
  names = ["test/exact_match", "test/loss"]
  (row,) = loopjax.table(runs, names, rows=["run.num_steps"], columns=both)
  steps = load_config("automaton_sleep", "smoke").run.num_steps
  name = "test/exact_match, model.num_loops"
  assert row["run.num_steps"] == steps
  assert row[f"{name}=4, run.seed=2"] == score_of(4, 2)
  assert row[f"{name}=1"] == pytest.approx(1.125)
  assert row["test/loss, model.num_loops=4/runs"] == 3
  assert len(row) == 1 + 2 * 2 * (3 + 3)


def test_runs_without_a_score_stay_and_are_named(runs, capsys):
  make_run(runs / "n4-s3", "running", model__num_loops=4, run__seed=3)
  make_run(
    runs / "n8-s0", "diverged", {"test/loss": 9.0}, model__num_loops=8,
    run__seed=0,
  )  # fmt: skip
  said = shown(capsys, runs, "--metric=test/loss", "--csv")
  rows = list(csv.DictReader(said.out.splitlines()))
  states = {row["state"]: row["test/loss"] for row in rows}
  steps = load_config("automaton_sleep", "smoke").run.num_steps
  state = f"incomplete, step 0 of {steps}"
  assert states == {"completed": "0.5", state: "", "diverged": ""}
  assert said.err.splitlines() == [
    f"note: {runs / 'n4-s3'}: {state}; its scores are left blank",
    f"note: {runs / 'n8-s0'}: diverged; its scores are left blank",
  ]
  words = ["--metric=test/loss", "--rows=model.num_loops"]
  text = shown(capsys, runs, *words)
  assert [line.split()[0] for line in text.out.splitlines()[1:]] == [
    "1", "4", "8",
  ]  # fmt: skip
  assert text.out.splitlines()[3].split() == ["8", "–"]
  assert text.err == said.err
  alone = shown(capsys, runs / "n8-s0", "--metric=test/loss", "--csv")
  assert alone.out.splitlines()[1].endswith("diverged,")


def test_a_mean_says_which_of_its_runs_have_no_finite_score(runs, capsys):
  """A summary has no score that is not finite; one not complete has none."""
  path = runs / "n4-s2" / "summary.json"
  summary = workdir_lib.read_json(path)
  del summary["metrics"]["test/exact_match"]
  workdir_lib.write_json(path, summary)
  words = [runs, "--metric=test/exact_match", "--rows=model.num_loops"]
  said = shown(capsys, *words)
  assert said.out.splitlines()[1:] == [
    "1                1.125 ± 0.31 (n=3)",
    "4                4.062 ± 0.79 (n=2 of 3)",
  ]
  assert said.err == (
    f"note: {runs / 'n4-s2'}: has no finite test/exact_match; the number of its"
    " row is of the other runs\n"
  )
  rows = list(csv.DictReader(shown(capsys, *words, "--csv").out.splitlines()))
  named = [row["test/exact_match/missing"] for row in rows]
  assert named == ["", str(runs / "n4-s2")]
  assert [row["test/exact_match/runs"] for row in rows] == ["3", "2"]
  (runs / "n4-s1" / "summary.json").unlink()
  said = shown(capsys, *words)
  assert said.out.splitlines()[2].split() == ["4", "4", "(n=1", "of", "3)"]
  assert f"note: {runs / 'n4-s1'}: incomplete" in said.err


def test_planned_runs_of_a_sweep_are_rows(runs, capsys):
  """With what the sweep sets; and the runs beside them once."""
  config = workdir_lib.read_json(runs / "n1-s0" / "config.json")
  planned = {**config, "model": {**config["model"], "num_loops": 2}}
  items = [
    {"overrides": {}, "directory": "n1-s0", "config": config},
    {"overrides": {}, "directory": "n2-s0", "config": planned},
  ]
  manifest = {"sweep": "a", "config": "c.py", "items": items}
  workdir_lib.write_json(runs / "sweep-a.json", manifest)
  found = loopjax.table(runs / "sweep-a.json", "test/loss")
  assert [(row["model.num_loops"], row["test/loss"]) for row in found] == [
    (1, 0.5),
    (2, None),
  ]
  assert f"{runs / 'n2-s0'}: not run; its" in capsys.readouterr().err
  assert len(loopjax.table([runs, runs / "n1-s0"])) == 7


def test_patterns_match_runs_alone(runs, tmp_path):
  (runs / "n1-s9.log").write_text("what it printed")
  (runs / "n1-pictures").mkdir()
  assert len(loopjax.table(f"{runs}/n1*")) == 3
  assert len(loopjax.table([f"{runs}/n?-s0", runs / "n1-s0"])) == 2
  with pytest.raises(UserError, match=r"none\*: matches no run"):
    loopjax.table(f"{tmp_path}/none*")
  with pytest.raises(UserError, match="no such directory"):
    loopjax.table(tmp_path / "none")
  with pytest.raises(UserError, match="n1-s9.log: is a file; expected"):
    loopjax.table(runs / "n1-s9.log")
  (runs / "n1-s0.log").write_text("a shell's * names it, too")
  assert len(loopjax.table([runs / "n1-s0.log", runs / "n1-s0"])) == 1
  with pytest.raises(UserError, match="no runs: name a work directory"):
    loopjax.table([])


def test_only_seeds_are_averaged(runs, tmp_path):
  """Other differences within a cell are a mistake, and repetitions as well."""
  make_run(runs / "wide", model__num_loops=4, run__seed=7, run__batch_size=8)
  with pytest.raises(
    UserError,
    match="run.batch_size differs between the runs of model.num_loops=4; add",
  ):
    loopjax.table(runs, rows="model.num_loops")
  found = loopjax.table(runs, rows=["model.num_loops", "run.batch_size"])
  assert len(found) == 3
  again = make_run(
    runs / "wide-again", model__num_loops=4, run__seed=7, run__batch_size=8
  )
  with pytest.raises(UserError, match=f"wide and {again} have the same"):
    loopjax.table(runs, columns="run.seed")
  assert len(loopjax.table(runs)) == 8
  # How a run was computed, and what its seed began from, are no difference.
  for seed in (0, 1):
    make_run(
      tmp_path / "other" / f"{seed}",
      run__seed=seed,
      run__checkpoint_every=10 + seed,
      run__init_from=f"runs/base-{seed}",
    )
  (row,) = loopjax.table(tmp_path / "other", "test/loss", rows="run.num_steps")
  assert row["test/loss/runs"] == 2


def test_runs_of_other_files_are_not_averaged(tmp_path, capsys):
  """Files are named by paths: another clone, or later, they are others."""
  for seed, content in enumerate(("aa", "bb", "aa")):
    path = make_run(tmp_path / f"s{seed}", run__seed=seed)
    summary = workdir_lib.read_summary(path)
    summary["data"] = {"train_sha256": content, "train_rows": seed}
    workdir_lib.write_json(path / "summary.json", summary)
  names = ("test/loss", "test/loss/runs")
  rows = loopjax.table(tmp_path, "test/loss", columns="run.num_steps")
  found = [[row[n] for n in row if n.endswith("/runs")] for row in rows]
  assert found == [[2], [1]] and len({*map(str, rows)}) == 2
  assert all("data.sha256" in row for row in rows)
  assert table.main([str(tmp_path), "--rows=run.num_steps"]) == 2
  assert "data.sha256 differs between the runs of run.num_steps=" in (
    capsys.readouterr().err
  )
  pairs = ["--rows=data.sha256", "--metric=test/loss"]
  lines = shown(capsys, str(tmp_path), *pairs).out.splitlines()
  assert len(lines) == 3 and "n=2" in lines[1] and "n=" not in lines[2]
  (tmp_path / "s1" / "summary.json").write_text(
    (tmp_path / "s0" / "summary.json").read_text()
  )
  (row,) = loopjax.table(tmp_path, "test/loss", rows="run.num_steps")
  assert row[names[1]] == 3  # With one content it is not a column.


def test_the_table_in_each_form(runs, capsys, tmp_path):
  words = [runs, "--metric=test/exact_match", "--rows=model.num_loops"]
  text = shown(capsys, *words).out
  assert text.splitlines()[1:] == [
    "1                1.125 ± 0.31 (n=3)",
    "4                4.125 ± 0.31 (n=3)",
  ]
  markdown = shown(capsys, *words, "--md").out.splitlines()
  assert markdown == [
    r"| model.num\_loops | test/exact\_match |",
    "| :--- | ---: |",
    "| 1 | 1.125 ± 0.31 (n=3) |",
    "| 4 | 4.125 ± 0.31 (n=3) |",
  ]
  rows = list(csv.DictReader(shown(capsys, *words, "--csv").out.splitlines()))
  assert float(rows[0]["test/exact_match/interval"]) == pytest.approx(
    4.302653 / 8 / math.sqrt(3), rel=1e-6
  )
  figure = tmp_path / "new" / "passes.png"
  assert shown(capsys, *words, f"--plot={figure}").out == f"{figure}\n"
  assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_figure_has_a_line_for_each_column(runs):
  """Of means in the order of the setting, with bars and a mark for each run."""
  make_run(
    runs / "fast", metrics={"test/exact_match": 9.0}, model__num_loops=2,
    run__batch_size=8,
  )  # fmt: skip
  pivot = records.pivot(
    records.read([runs]),
    ["test/exact_match", "steps"],
    ["model.num_loops"],
    ["run.batch_size"],
  )
  figure = plots.draw_pivot(pivot, "model.num_loops")
  first, second = figure.get_axes()
  assert [axes.get_title(loc="left") for axes in (first, second)] == [
    "test/exact_match",
    "steps",
  ]
  assert first.get_xlabel() == "loops"
  assert [label.get_text() for label in first.get_xticklabels()] == [
    "1", "2", "4",
  ]  # fmt: skip
  large, small = (box.lines for box in first.containers)
  means = [float(y) for y in small[0].get_ydata()]
  assert means[0] == 1.125 and math.isnan(means[1])
  assert [float(y) for y in large[0].get_ydata()][1] == 9.0
  bars = small[2][0].get_segments()
  assert (bars[0][1][1] - bars[0][0][1]) / 2 == pytest.approx(0.3105, rel=1e-3)
  assert sum(len(marks.get_offsets()) for marks in first.collections[-1:]) == 6
  names = [text.get_text() for text in first.get_legend().get_texts()]
  batch = load_config("automaton_sleep", "smoke").run.batch_size
  assert [name.replace("\u00a0", " ") for name in names] == [
    "batch size = 8",
    f"batch size = {batch}",
  ]


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (
      ["--metric=test/los"],
      "--metric=test/los: no run has this score; did you",
    ),
    (["--rows=model.num_lops"], "unknown setting 'model.num_lops'; did you"),
    (["--csv", "--md"], "not allowed with argument"),
    (["--plot=a.png"], "--plot needs --rows=SETTING, one setting"),
    (["--plot=a.png", "--rows=run.seed,model.width"], "--plot needs --rows="),
    (["--plot=a.txt", "--rows=model.num_loops"], "must end with .png, .pdf"),
    (["--metrics=test/loss"], "unknown flag '--metrics'; did you mean"),
    (["--plot=/proc/a/b.png", "--rows=model.num_loops"], "cannot be written"),
  ],
)
def test_mistakes_are_one_line(runs, refusal, arguments, said):
  assert said in refusal(table.main, [str(runs), *arguments])


def test_stored_runs_are_runs(tmp_path):
  """As `report.keep` writes them, without their work directories."""
  config = config_lib.to_dict(load_config("automaton_sleep", "smoke"))
  summary = {"metrics": SCORES, "steps": 3, "parameters": 4}
  item = {"directory": "a", "overrides": {}, "config": config}
  items = [{**item, "summary": summary, "evaluations": []}]
  content = {"sweep": "", "config": "", "overrides": {}, "items": items}
  path = tmp_path / "kept.runs.json"
  path.write_text(json.dumps(content))
  for place in (path, tmp_path, f"{tmp_path}/*"):
    (row,) = loopjax.table(place)
    assert row["run"] == (tmp_path / "kept" / "a").as_posix()
    assert (row["test/loss"], row["steps"]) == (1.0, 3)
    assert "train/loss" not in row


def test_numbers_ascend_and_names_are_in_the_order_of_runs(tmp_path):
  """Rows and columns; directories have another order."""
  for place, (passes, order) in enumerate(
    [(16, "b"), (2, "a"), (8, "b"), (8, "a"), (2, "b"), (16, "a")]
  ):
    make_run(
      tmp_path / str(place),
      model__num_loops=passes,
      optim__name={"a": "adamw", "b": "muon"}[order],
    )
  paths = sorted(tmp_path.iterdir())
  loops, names = "model.num_loops", "optim.name"
  found = loopjax.table(paths, "test/loss", rows=[names, loops])
  assert [(row[names], row[loops]) for row in found] == [
    (name, passes) for name in ("muon", "adamw") for passes in (2, 8, 16)
  ]
  found = loopjax.table(paths, "test/loss", rows=[names], columns=[loops])
  assert list(found[0])[1:] == [f"test/loss, {loops}={k}" for k in (2, 8, 16)]
