"""The report: arithmetic, matching the paper's rows, escaping, states."""

import base64
import csv
import itertools
import json
import re
import shlex
import shutil
import statistics

import numpy as np
import pytest
from report_examples import log, write_run
from tests_support import crossing, load_config, namespace, summary_of

from loopjax.analysis import figures
from loopjax.data.gsm import task as gsm_task
from loopjax.errors import UserError
from loopjax.report import __main__ as command
from loopjax.report import (
  grouping,
  page,
  papers,
  plots,
  quantities,
  records,
  table,
  tables,
)
from loopjax.report import runs as runs_lib
from loopjax.report.papers import PAPERS, of
from loopjax.run import workdir as workdir_lib
from loopjax.sections import flatten
from loopjax.sweep import items as items_lib

UTM, DISCO, LANGUAGE, AUTOMATON, DEPO, GSM, ADAPTIVE, MELT, LOOPED = map(
  papers.read,
  (
    "utm", "disco", "language", "automaton", "depo", "gsm", "adaptive", "melt",
    "looped",
  ),
)  # fmt: skip
PNG = base64.b64decode(
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6"
  "kgAAAABJRU5ErkJggg=="
)


def make_run(directory, config, exact, **changes):
  summary = {
    "status": "completed",
    "metrics": {
      "test/exact_match": exact,
      "test/exact_match/standard_error": 0.01,
      "test/ponder_steps": 2.5,
      "test/count": 520.0,
    },
    "parameters": 3447,
    "steps": 20,
    "wall_seconds": 30.0,
    "devices": "1 x cpu",
    "versions": {"python": "3.11"},
    "revision": "abc",
    "command": "python -m loopjax.main",
    "data": {"train_examples": 1480},
    **changes,
  }
  write_run(directory, config, summary)
  (directory / "figures").mkdir()
  (directory / "figures" / "curves.png").write_bytes(PNG)


def items_of(name, preset="smoke", file="sudoku_utm"):
  sweeps = namespace(file)["sweeps"]
  config = load_config(file, preset)
  if name == "retrofit":
    config.run.init_from = "runs/vanilla"
  return items_lib.make_items(config, sweeps, name, {})


def test_seeds_of_multihop_runs_have_graphs_of_their_own():
  """Except if a run starts from another one, which knows its graph."""
  own, kept = (
    [item.config for item in items_of(name, file="multihop_disco")]
    for name in ("models", "retrofit")
  )
  seeds = [
    (c["run"]["seed"], c["task"]["graph_seed"], c["task"]["split_seed"])
    for c in own
  ]
  assert set(seeds) == {(0, 0, 0), (1, 1, 1), (2, 2, 2)}
  assert {c["task"]["graph_seed"] for c in kept} == {0}
  assert {c["run"]["seed"] for c in kept} == {0, 1, 2}


@pytest.fixture
def workdir(tmp_path):
  """A memory curve: T = 0 complete, one seed of T = 4, one unfinished."""
  items = items_of("memory_curve")
  common = {"optim.betas": (0.9, 0.95)}
  items_lib.write_manifest(
    tmp_path, "memory_curve", "c.py:smoke", common, items
  )
  for item, exact in zip(items, [0.1, 0.2, 0.6, 0.5], strict=False):
    make_run(tmp_path / item.slug, item.config, exact)
  rows = [{"step": 10, "split": "train"}]  # Of one that is unfinished.
  write_run(tmp_path / items[4].slug, items[4].config, rows=rows)
  return tmp_path


def written(workdir):
  """The report on a directory: its page and its Markdown."""
  return page.write(runs_lib.collect([workdir]), workdir)[:2]


def plan_of(workdir):
  (plan,), others = runs_lib.collect([workdir])
  assert others == []
  return plan


def ours(runs, column=UTM.sweeps["memory_curve"].columns[0]):
  """A quantity over runs that are one group."""
  (group,) = grouping.group_by_seed(runs)
  return grouping.ours(group, column)


def test_a_number_is_a_mean_over_seeds_with_its_errors(workdir):
  """Of one seed: the error over examples. Another seed tells runs apart."""
  runs = plan_of(workdir).runs
  three, one = ours(runs[:3]), ours(runs[3:6])
  assert three.mean == pytest.approx(30.0)
  assert three.std == pytest.approx(26.457513)  # sqrt((400 + 100 + 900) / 2)
  assert three.seeds == pytest.approx({"0": 10.0, "42": 20.0, "123": 60.0})
  assert three.standard_error == pytest.approx(26.457513 / 3**0.5)
  assert (one.mean, one.std) == (pytest.approx(50.0), None)
  assert one.standard_error == pytest.approx(1.0)  # 0.01, in percent.
  assert ours(runs[6:9]) is None
  twins = [
    runs[0]._replace(overrides={**runs[0].overrides, "task.split_seed": seed})
    for seed in (0, 1)
  ]
  assert ours(twins).seeds == pytest.approx({"0/0": 10.0, "0/1": 10.0})
  assert ours(twins).std == 0.0
  assert "se\u00a015; s0:\u00a010.0" in written(workdir)[1].read_text()


def test_other_runs_do_not_count(workdir):
  """Those that diverged, or have another configuration; nor is a Hub's one."""
  first, second, third, *_ = plan_of(workdir).runs
  summary = {**third.summary, "status": "diverged"}
  workdir_lib.write_json(third.directory / "summary.json", summary)
  assert ours(plan_of(workdir).runs[:3]).mean == pytest.approx(15.0)
  assert "1 diverged" in written(workdir)[0].read_text()
  config = {**first.config, "run": {**first.config["run"], "seed": 9}}
  workdir_lib.write_json(first.directory / "config.json", config)
  changed = plan_of(workdir).runs
  assert changed[0].state == "another configuration"
  assert list(ours(changed[:3]).seeds) == ["42"]
  folder = workdir / "exported"
  folder.mkdir()
  workdir_lib.write_json(folder / "config.json", {"model_type": "ouro"})
  assert len(plan_of(workdir).runs) == len(changed)
  with pytest.raises(UserError, match="exported: contains no run"):
    runs_lib.collect([folder])


def depths(name, values):
  return {f"depth/{name}/loop={k}": x for k, x in enumerate(values)}


CHOSEN = {  # Validation chooses the third loop, not the test.
  **depths("test_ood_4/accuracy", [0.1, 0.2, 0.5, 0.75]),
  **depths("validation_ood_4/accuracy", [0.0, 0.1, 0.8, 0.7]),
  **depths("validation_ood_4/accuracy/standard_error", [0.9] * 5),
  **depths("validation_ood_5/accuracy", [0.95] * 5),
}


@pytest.mark.parametrize(
  ("paper", "sweep", "key", "metrics", "expected", "error"),
  [
    (UTM, "memory_curve", "exact", {"test/exact_match": 0.5}, 50, None),
    (UTM, "tradeoff", "token_steps", {"test/ponder_steps": 1.5}, 133.5, None),
    (UTM, "depth", "once", depths("exact_match", [0] * 17 + [0.5]), 50, None),
    (
      UTM, "depth", "twice", {
        "depth/exact_match/loop=35": 0.25,
        "depth/exact_match/standard_error/loop=35": 0.02,
      }, 25, 2,
    ),
    (UTM, "depth", "twice", depths("exact_match", [0.5] * 35), None, None),
    (
      DISCO, "models", "test_id_2/stage1_accuracy",
      {"test_id_2/stage1_accuracy": 0.125}, 12.5, None,
    ),
    (DISCO, "length_generalisation", "ood_4", CHOSEN, 50, None),
    (DISCO, "length_generalisation", "ood_4", {}, None, None),
  ],
)  # fmt: skip
def test_a_column_reads_its_score(paper, sweep, key, metrics, expected, error):
  """And the error over examples, if the run has it."""
  (column,) = (x for x in paper.sweeps[sweep].columns if x.key == key)
  config = {
    "task": {"box_rows": 3, "box_cols": 3},
    "model": {"num_memory_tokens": 8, "num_loops": 18},
  }
  run = runs_lib.Run(None, {}, {}, "completed", config, {"metrics": metrics})
  found = [column.of(run), column.standard_error(run)]
  assert found == [
    x if x is None else pytest.approx(x) for x in (expected, error)
  ]


def test_what_a_row_took_is_that_of_its_runs(workdir):
  plan = plan_of(workdir)
  for run, seconds in zip(plan.runs, (7200, 10_800, 18_000), strict=False):
    summary = summary_of(run.directory) | {"wall_seconds": seconds}
    path = run.directory / "summary.json"
    path.write_text(json.dumps(summary), encoding="utf-8")
  text = written(workdir)[1].read_text().replace("\u00a0", " ")
  header, row = (
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in text.splitlines()
    if line.startswith(("| setting |", "| memory tokens = 0"))
  )
  of = dict(zip(header, row, strict=True))
  assert of["runs"] == "3 of 3"
  assert (of["test examples"], of["training steps"]) == ("520", "20")
  assert of["parameters"] == "3,447"
  assert of["wall time"] == "3.3 hours"  # The mean of 2, 3 and 5.
  assert tables.distinct([1, 2, 2, None]) == "1, 2"
  assert tables.distinct(range(8)) == "0, 1, 2, 3, 4, 5, and 2 more"


def of_the_papers_size(exact):
  """Three seeds with T = 8 and a deviation of 1, as large as the paper's."""
  config = flatten(load_config("sudoku_utm", "paper").to_dict())
  values = (exact - 1.0, exact, exact + 1.0)
  runs = [
    runs_lib.Run(
      None,
      {},
      {**config, "model.num_memory_tokens": 8},
      "completed",
      {"run": {"seed": seed}},
      {"metrics": {"test/exact_match": value / 100}},
    )
    for seed, value in enumerate(values)
  ]
  return grouping.Group({}, runs)


def test_numbers_agree_within_two_standard_errors_of_both():
  """57.4 +- 0.7 of three seeds at T = 8; ours has a deviation of 1."""
  sweep = UTM.sweeps["memory_curve"]
  bound = 2 * ((1.0 + 0.7**2) / 3) ** 0.5
  for exact, expected in (
    (57.4 + 0.99 * bound, "agrees"),
    (57.4 - 0.99 * bound, "agrees"),
    (57.4 + 1.01 * bound, "disagrees"),
  ):
    group = of_the_papers_size(exact)
    assert grouping.verdict(group, sweep, UTM) == expected
  small = UTM._replace(size={"model.width": 2048})
  for paper in (small, UTM._replace(size=None)):
    said = grouping.verdict(of_the_papers_size(57.4), sweep, paper)
    assert said == "not run at this scale"
  none = grouping.Group({}, [r._replace(state="not run") for r in group.runs])
  assert grouping.verdict(none, sweep, UTM) == "not run"
  ours = sweep._replace(rows=())
  assert grouping.verdict(of_the_papers_size(57.4), ours, UTM) == ""


def test_a_number_without_an_error_decides_nothing():
  """89 tokens x 11.6 loops are 1032.4 of one run; the paper prints 1032."""
  config = load_config("sudoku_utm", "paper,model.num_memory_tokens=8")
  metrics = {"test/exact_match": 0.5709, "test/ponder_steps": 11.6}
  errors = {f"{name}/standard_error": 0.004 for name in metrics}
  run, *_ = of_the_papers_size(57.09).runs
  run = run._replace(
    config=config.to_dict(), summary={"metrics": metrics | errors}
  )
  group, sweep = grouping.Group({}, [run]), UTM.sweeps["tradeoff"]
  assert grouping.verdict(group, sweep, UTM) == "agrees"
  (alone,) = [x for x in sweep.columns if x.key == "token_steps"]
  sweep = sweep._replace(columns=(alone,))
  assert grouping.verdict(group, sweep, UTM) == ""


@pytest.mark.parametrize(
  ("file", "paper"),
  [
    ("sudoku_utm", UTM),
    ("multihop_disco", DISCO),
    ("language_disco", DISCO),
    ("lm_disco", LANGUAGE),
    ("automaton_sleep", AUTOMATON),
    ("depo_sleep", DEPO),
    ("lm_adaptive", ADAPTIVE),
  ],
)
def test_only_the_paper_preset_is_of_the_papers_size(file, paper):
  fitting = [
    preset
    for preset in namespace(file)["PRESETS"]
    if grouping.fits(paper.size, flatten(load_config(file, preset).to_dict()))
  ]
  assert {"paper"} <= set(fitting) <= {"paper", "hybrid"}


def rows_of(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def test_the_runs_as_data(workdir, capsys):
  """A row per run, with its task's score: the same as `loopjax table`."""
  path = page.write(runs_lib.collect([workdir]), workdir)[2]
  data = rows_of(path)
  assert len(data) == len(plan_of(workdir).runs)
  assert list(data[0]) == [
    *("run", "state", "model.num_memory_tokens", "run.seed"),
    *("test/exact_match", "test/ponder_steps", "test/count"),
    *("steps", "parameters", "wall_seconds"),
  ]
  first, unfinished, missing = data[0], data[4], data[5]
  assert first["run"] == plan_of(workdir).runs[0].directory.as_posix()
  assert (first["state"], first["run.seed"]) == ("completed", "0")
  assert (first["test/exact_match"], first["test/count"]) == ("0.1", "520.0")
  assert unfinished["state"] == "incomplete, step 10 of 20"
  assert (unfinished["test/exact_match"], missing["steps"]) == ("", "")
  capsys.readouterr()
  assert table.main([str(workdir), "--csv"]) == 0
  assert capsys.readouterr().out == path.read_text()


def test_the_papers_numbers_are_in_a_file_of_their_own(workdir):
  """Also those of comparisons that were not run; the page has the command."""
  _, markdown, _, path = page.write(runs_lib.collect([workdir]), workdir)
  assert path == workdir / "papers.csv"
  data = rows_of(path)
  assert {row["paper"] for row in data} == {UTM.name}
  row = next(row for row in data if row["sweep"] == "memory_curve")
  assert (row["row"], row["quantity"]) == ("T = 0", "exact match, %")
  assert (row["mean"], row["std"], row["seeds"]) == ("2.5", "0.2", "3")
  cold = [row for row in data if row["row"] == "lambda 0.001, no warm-up"]
  assert [row["mean"] for row in cold] == ["3.8", "3.7"]
  [line] = re.findall("python -m loopjax.sweep .*", markdown.read_text())
  command = shlex.split(line)  # As a shell reads it.
  assert command[4] == "--config.optim.betas=(0.9, 0.95)"
  assert "--sweep=memory_curve" in command


def test_sweeps_of_ones_own_have_no_rows_of_papers(workdir):
  (workdir / "sweep-memory_curve.json").rename(workdir / "sweep-mine.json")
  html, _, data = page.write(runs_lib.collect([workdir]), workdir)
  assert len(rows_of(data)) == len(plan_of(workdir).runs)
  assert "Not run here" not in html.read_text()
  assert not (workdir / "papers.csv").exists()
  plan = plan_of(workdir)
  assert tables.sweep_of(plan).panels == UTM.panels != ()
  assert not tables.sweep_of(plan._replace(chosen_for=("a.b",))).panels


def test_a_point_is_no_line_over_a_setting(workdir):
  """Figure 2 of UTM: memory tokens, with a line for each bias."""
  (panel,) = UTM.sweeps["router_init"].panels
  groups = grouping.group_by_seed(plan_of(workdir).runs)
  (line,) = plots.by_setting(groups, panel)
  assert (list(line.x), list(line.y)) == ([0, 4], pytest.approx([30, 50]))
  (again,) = plots.by_setting(groups[::-1], panel)  # From left to right.
  assert list(again.x) == list(line.x) and list(again.y) == list(line.y)
  assert plots.by_setting(groups[:1], panel) == []


def test_several_directories_are_one_report(workdir, tmp_path, capsys):
  """Folders of runs and of sweeps, wherever they are; each run once."""
  runs = tmp_path / "elsewhere" / "runs"
  config = plan_of(workdir).runs[0].config
  for number in range(7):
    make_run(runs / "deep" / f"by_hand_{number}", config, number / 8)
  out = tmp_path / "report"
  (runs.parent / "pages").mkdir()
  out.symlink_to(runs.parent / "pages")
  folders = [str(workdir), str(runs), str(runs / "deep")]
  assert command.main([*folders, f"--out={out}"]) == 0
  names = ("report.html", "report.md", "report.csv", "papers.csv")
  assert capsys.readouterr().out.split() == [str(out / name) for name in names]
  text = (out / "report.md").read_text()
  assert "Runs outside sweeps" in text
  assert text.count("exact match, %: 75.0") == 1
  assert "30.0\u00a0±\u00a026.5" in text
  assert text.count("(figures: 1)") == page.MAX_RUNS_WITH_FIGURES
  (path, *_) = re.findall(r"\]\((\S*by_hand_0/figures/curves.png)\)", text)
  assert (out / path).is_file()
  assert command.main(folders) == 2
  assert "--out=FOLDER is required" in capsys.readouterr().err


def test_sweeps_of_one_name_have_their_own_pictures(workdir, tmp_path):
  """For example, the same sweep on two machines."""
  other = tmp_path / "gpu" / workdir.name
  other.mkdir(parents=True)
  for path in [*workdir.iterdir()]:
    if path != other.parent:
      path.rename(other / path.name)
  again = tmp_path / "cpu" / workdir.name
  shutil.copytree(other, again)
  text = page.write(runs_lib.collect([again, other]), tmp_path)[1].read_text()
  pictures = re.findall(r"\]\((report_figures/\S+)\)", text)
  assert len(set(pictures)) == len(pictures) == 2


def test_what_is_not_there_is_said(workdir):
  runs = plan_of(workdir).runs
  assert [run.state for run in runs[:6]] == [
    *["completed"] * 4,
    "incomplete, step 10 of 20",
    "not run",
  ]
  html, markdown = (path.read_text() for path in written(workdir))
  for text in (html, markdown):
    assert "30.0\u00a0±\u00a026.5" in text
    assert "1\u00a0of\u00a03" in text
    assert "1 incomplete, step 10 of 20; 1 not run" in text
    assert "not run" in text
    assert "57.4\u00a0±\u00a00.7" in text  # Table 3, T = 8.
    assert "bimodal" in text
  label = "exact match, %"  # Whose numbers they are, in words and by a shade.
  assert f"| setting | ours: {label} | paper: {label} |" in markdown
  marked = re.findall('<t[hd] style="[^"]*" class="paper">([^<]*)', html)
  assert f"paper: {label}" in marked and "57.4\u00a0±\u00a00.7 " in marked
  assert not any(text.startswith("ours") for text in marked)
  plan = plan_of(workdir)
  counts = f"4 of {len(plan.runs)} runs, 3 seeds"
  assert f"<small>{counts}</small>" in "".join(page._contents([plan, plan]))


def test_a_folder_may_vanish_while_runs_are_looked_for(tmp_path):
  """A run that has no config.json yet, and renames its first checkpoint."""
  for name in ("a.tmp", "b"):
    (tmp_path / name).mkdir()
  found = []
  for path in runs_lib._directories(tmp_path):
    found.append(path.name)
    if path.name == "a.tmp":
      path.rename(tmp_path / "a")
  assert found == [tmp_path.name, "a.tmp", "b"]


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
  """As a second `ln -s /data/runs runs` makes one."""
  runs, run = tmp_path / "runs", tmp_path / "runs" / "a" / "b"
  run.mkdir(parents=True)
  (run / "config.json").write_text("{}")
  (runs / "a" / "runs").symlink_to(runs)
  assert list(runs_lib._directories(runs)) == [runs, runs / "a", run]


@pytest.mark.parametrize(
  ("file", "paper", "name"),
  [
    *(("sudoku_utm", UTM, name) for name in UTM.sweeps),
    *(("multihop_disco", DISCO, name) for name in DISCO.sweeps),
    *(("language_disco", DISCO, name) for name in ("models", "gate")),
    *(("lm_disco", LANGUAGE, name) for name in LANGUAGE.sweeps),
    *(("automaton_sleep", AUTOMATON, n) for n in AUTOMATON.sweeps),
    *(("depo_sleep", DEPO, name) for name in DEPO.sweeps),
    *(("gsm_sleep", GSM, name) for name in GSM.sweeps),
    *(
      ("lm_adaptive", ADAPTIVE, name)
      for name in ADAPTIVE.sweeps
      if not name.startswith("knowledge")  # Stored runs of a task that left.
    ),
    *(
      ("lm_melt", MELT, name)
      for name in MELT.sweeps
      if name != "decoding"  # Stored runs of settings that left.
    ),
    *(("lm_looped", LOOPED, name) for name in LOOPED.sweeps),
  ],
)
@crossing("preset", ["tiny", "smoke"], manual=["smoke"])
def test_every_row_of_the_paper_has_its_items(file, paper, name, preset):
  rows = paper.sweeps[name].rows
  items = items_of(name, preset, file)
  planned = [flatten(item.config) for item in items]
  matched = [grouping.row_of(settings, rows) for settings in planned]
  formats = {None, *(settings.get("task.format") for settings in planned)}
  expected = {  # The other form of a task belongs to another config.
    row.label for row in rows if row.settings.get("task.format") in formats
  }
  assert expected == {row.label for row in matched if row}
  if file == "lm_looped":  # The published weights run four loops.
    assert all(
      (row is None) == (settings["model.num_loops"] != 4)
      for settings, row in zip(planned, matched, strict=True)
      if rows
    )
  elif rows:  # The paper has no PonderLM here, or a different teacher.
    others = [i for i, row in zip(items, matched, strict=True) if row is None]
    outside = ("ponderlm", "looped") if file == "lm_melt" else ("ponderlm",)
    assert all(i.overrides["model.name"] in outside for i in others)
  for settings in planned:  # No two rows match equally well.
    fits = [
      len(row.settings) for row in rows if grouping.fits(row.settings, settings)
    ]
    assert fits.count(max(fits, default=0)) <= 1


def test_an_english_task_has_no_numbers_of_the_symbolic_one(tmp_path):
  for file, vanilla in (("multihop_disco", "71.1"), ("language_disco", "")):
    workdir = tmp_path / file
    items = items_of("models", "smoke", file)
    items_lib.write_manifest(workdir, "models", file, {}, items)
    markdown = written(workdir)[1].read_text()
    assert ("71.1" in markdown) == bool(vanilla)
    assert ("about 90" in markdown) != bool(vanilla)


def figures_of(monkeypatch, groups, sweep):
  """The figures of a sweep's panels: one, or none."""
  figures = []
  with monkeypatch.context() as patch:
    patch.setattr(plots, "_png", figures.append)
    plots.draw_panels(groups, sweep)
  return figures


def drawn_by(monkeypatch, groups, panels, rows=()):
  """{title: [(label, style, x, y)]} of the figure."""
  sweep = papers.Sweep("", "", (), tuple(rows), panels=panels)
  figures = figures_of(monkeypatch, groups, sweep)
  return {
    axes.get_title(loc="left"): [
      (line.get_label(), line.get_linestyle(), *map(list, line.get_data()))
      for line in axes.get_lines()
    ]
    for figure in figures
    for axes in figure.get_axes()
    if axes.get_visible()
  }


def test_lines_of_one_colour_have_other_markers(monkeypatch):
  """In both figures, where there are more lines than colours."""
  x = np.arange(40)
  curves = [plots.Curve(n, f"{n}", False, x, n * x) for n in range(25)]
  monkeypatch.setattr(plots, "by_run", lambda *_: curves)
  panels = (papers.Panel("loss", ("validation/loss",)),)
  sweep = papers.Sweep("", "", (), panels=panels)
  (figure,) = figures_of(monkeypatch, [], sweep)
  one = grouping.Spread({"0": 0.5})
  columns = [
    records.Column("test/loss", {"run.batch_size": n}, {}, [one])
    for n in range(25)
  ]
  pivot = records.Pivot([{"model.num_loops": 1}], columns)
  for drawn in (figure, plots.draw_pivot(pivot, "model.num_loops")):
    (axes,) = (axes for axes in drawn.get_axes() if axes.get_visible())
    lines = axes.get_legend_handles_labels()[0]
    looks = [look_of(line) for line in lines]
    assert len(looks) == len({*looks}) == 25


def look_of(handle):
  """Colour and marker of an entry of a legend."""
  line = handle[0] if isinstance(handle, tuple) else handle
  return line.get_color(), line.get_marker()


def test_the_runs_of_a_figure_lie_on_top_of_each_other(tmp_path, monkeypatch):
  """Figures 3 and 4: every model, in and out of distribution (dashed)."""
  items = items_of("models", "smoke", "language_disco")
  items_lib.write_manifest(tmp_path, "models", "c.py", {}, items)
  ran = [i for i in items if i.config["run"]["seed"] < 2]
  for number, item in enumerate(ran):
    make_run(tmp_path / item.slug, item.config, 0.5)
    rows = [
      {"step": 10, "split": "validation_id_2", "accuracy": number / 100},
      {"step": 20, "split": "validation_id_2", "accuracy": 0.5},
      {"step": 10, "split": "validation_ood_2", "accuracy": 0.125},
      {"step": 20, "split": "validation_ood_2", "accuracy": 0.25},
      {"step": 20, "split": "train_2", "stage1_accuracy": 0.5},  # One point.
    ]
    log(tmp_path / item.slug, rows)
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  panels = DISCO.sweeps["models"].panels
  drawn = drawn_by(monkeypatch, groups, panels)
  assert list(drawn) == [
    f"validation: ID, OOD (dashed), 2 hops, {name}, %"
    for name in ("direct", "reverse")
  ]
  direct, reverse = drawn.values()
  assert len(direct) == len(reverse) == 3 * 2 * 2  # Models, seeds, splits.
  labels = [line[0] for line in direct if not line[0].startswith("_")]
  assert labels == [
    f"model\u00a0=\u00a0{name}" for name in ("disco", "looped", "transformer")
  ]
  batch = items[0].config["run"]["batch_size"]
  assert direct[0][1:] == ("-", [10 * batch, 20 * batch], [0.0, 50.0])
  assert direct[1][1:] == ("--", [10 * batch, 20 * batch], [12.5, 25.0])
  assert reverse[0][3] == [6.0, 50.0]  # Three models and two seeds later.
  assert drawn_by(monkeypatch, groups[:1], panels[:2]) == {}  # Symbolic.


def test_models_are_compared_by_the_loops_they_run(tmp_path, monkeypatch):
  """Figure 7: accuracy after every step at inference."""
  items = items_of("depth")
  items_lib.write_manifest(tmp_path, "depth", "c.py", {}, items)
  for item in items:
    scores = {f"depth/exact_match/loop={k}": k / 20 for k in range(8)}
    scores["depth/exact_match/standard_error/loop=0"] = 9.0
    make_run(tmp_path / item.slug, item.config, 0.5, metrics=scores)
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  sweep = UTM.sweeps["depth"]
  (lines,) = drawn_by(monkeypatch, groups, sweep.panels).values()
  assert len(lines) == len(items) == 3
  assert lines[0][2] == list(range(1, 9))
  assert lines[0][3] == pytest.approx([5.0 * k for k in range(8)])
  (figure,) = figures_of(monkeypatch, groups, sweep)
  ticks = figure.axes[0].get_xticks()
  assert len(ticks) > 4 and all(tick.is_integer() for tick in ticks)


def test_points_are_beside_the_papers_or_on_their_place(workdir, monkeypatch):
  figures = []
  monkeypatch.setattr(plots, "_png", figures.append)
  groups = grouping.group_by_seed(plan_of(workdir).runs)
  sweep = UTM.sweeps["memory_curve"]
  for rows, shift in ((sweep.rows, -0.06), ((), 0.0)):
    plots.draw_curve(groups, sweep._replace(rows=rows))
    line, *_ = figures[-1].axes[0].containers[0]
    assert line.get_xdata()[:2] == pytest.approx([shift, 1 + shift])


def test_the_picture_of_the_runs_is_in_the_report(workdir, monkeypatch):
  panel = papers.Panel("exact match, %", ("depth/exact_match",), "loops")
  loss = papers.Panel("loss", ("validation/loss",), factor=1.0)
  sweep = UTM.sweeps["memory_curve"]._replace(panels=(panel, loss))
  known = {"memory_curve": sweep}
  monkeypatch.setitem(PAPERS, "sudoku", UTM._replace(sweeps=known))
  run = plan_of(workdir).runs[0]
  metrics = {f"depth/exact_match/loop={k}": 0.5 for k in range(3)}
  summary = {**run.summary, "metrics": metrics}
  workdir_lib.write_json(run.directory / "summary.json", summary)
  name = f"{workdir.name}-memory_curve_runs.png"
  text = written(workdir)[1].read_text()
  assert name in text
  assert "over loops: one line per run" in text
  assert "start at 0" not in text  # The loss has no curve.
  picture = workdir / "report_figures" / name
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_report_knows_every_sweep():
  def names_of(file):
    config = load_config(file, "tiny")
    config.run.init_from = "runs/vanilla"  # Some start from a trained run.
    return set(namespace(file)["sweeps"](config))

  assert set(UTM.sweeps) == names_of("sudoku_utm")
  assert set(DISCO.sweeps) == names_of("multihop_disco")
  assert names_of("language_disco") <= set(DISCO.sweeps)
  assert set(LANGUAGE.sweeps) == names_of("lm_disco")
  for task in ("automaton", "depo", "gsm"):
    assert set(PAPERS[task].sweeps) == names_of(f"{task}_sleep")
  left = {"knowledge", "knowledge_rates"}  # Their runs are stored.
  assert set(ADAPTIVE.sweeps) == names_of("lm_adaptive") | left
  assert set(MELT.sweeps) == names_of("lm_melt") | {"decoding"}
  assert set(LOOPED.sweeps) == names_of("lm_looped")


def test_a_task_may_have_a_paper_for_each_family():
  assert of("text", "adaptive") is of("arithmetic", "adaptive")
  assert of("text", "adaptive") is ADAPTIVE
  assert of("multihop", "adaptive") is DISCO
  assert of("text", "looped") is LOOPED
  assert of("chess", "adaptive") is None


def lm_runs(tmp_path, name):
  """A finished run for each item of a sweep, scores 0.1, 0.2, ..."""
  items = items_of(name, "smoke", "lm_adaptive")
  items_lib.write_manifest(tmp_path, name, "c.py", {}, items)
  for number, item in enumerate(items, 1):
    metrics = {"test/bits_per_byte": number / 10}
    make_run(tmp_path / item.slug, item.config, 0.0, metrics=metrics)
  return items


def test_a_setting_is_an_axis_and_another_one_has_the_lines(
  tmp_path, monkeypatch
):
  """The frontier: loops, with a line for each number of slots."""
  items = lm_runs(tmp_path, "frontier")
  assert [item.config["model"]["num_loops"] for item in items[::3]] == [
    1, 2, 3, 6,
  ]  # fmt: skip
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  panels = ADAPTIVE.sweeps["frontier"].panels
  (lines,) = drawn_by(monkeypatch, groups, panels).values()
  assert [line[0] for line in lines] == [
    f"slots per layer\u00a0=\u00a0{slots}" for slots in (0, 8, 16)
  ]
  for number, line in enumerate(lines, 1):
    assert line[2] == [1, 2, 3, 6]
    assert line[3] == pytest.approx([(number + 3 * i) / 10 for i in range(4)])


def test_curves_have_the_names_of_the_papers_rows(tmp_path, monkeypatch):
  """Ten lines: distinguished by colour, in one legend below the panels."""
  items = lm_runs(tmp_path, "table_1")
  row = {"split": "validation", "bits_per_byte": 2.0}
  for item in items:
    log(tmp_path / item.slug, [{"step": step, **row} for step in (10, 20)])
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  sweep = ADAPTIVE.sweeps["table_1"]
  names = [row.label for row in sweep.rows]
  (figure,) = figures_of(monkeypatch, groups, sweep)
  (legend,) = figure.legends
  assert {text.get_text() for text in legend.get_texts()} == set(names)
  (axes,) = (axes for axes in figure.get_axes() if axes.get_visible())
  assert len({line.get_color() for line in axes.get_lines()}) == len(names)
  # Groups of one row are distinguished by their settings.
  same = [sweep.rows[0]._replace(settings={})]
  (lines,) = drawn_by(monkeypatch, groups, sweep.panels, same).values()
  assert not {line[0] for line in lines} & set(names)
  assert len({line[0] for line in lines}) == len(names)


def test_a_metric_is_drawn_over_another_one(tmp_path, monkeypatch):
  """Figure 3: iterations over the loss of the same evaluations."""
  items = lm_runs(tmp_path, "table_1")
  rows = [
    {"step": 10, "split": "validation", "loss": 3.0, "ponder_steps": 1.5},
    {"step": 20, "split": "validation", "loss": 2.0, "ponder_steps": 2.5},
    {"step": 30, "split": "validation", "ponder_steps": 9.0},
  ]
  log(tmp_path / items[1].slug, rows)
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  panels = ADAPTIVE.sweeps["table_1"].panels
  ((_, _, x, y),) = drawn_by(monkeypatch, groups, panels)[panels[1].title]
  assert (x, y) == ([3.0, 2.0], [1.5, 2.5])
  # Our numbers are beside the paper's.
  markdown = written(tmp_path)[1].read_text()
  assert "1.687" in markdown
  assert "step 5,000: 2.034; 20,000: 1.819" in markdown


def test_the_loss_at_which_layers_begin_stands_beside_the_papers(
  tmp_path, monkeypatch
):
  """Figure 3, for synthetic runs: layer 1 begins at a loss of 2 + seed / 2."""
  items = lm_runs(tmp_path, "onset")
  numbers = {item.config["model"]["num_loops"] for item in items}
  seeds = [item.config["run"]["seed"] for item in items]
  assert (numbers, len(items), set(seeds)) == ({3, 5, 7}, 9, {0, 1, 2})
  for item, seed in zip(items, seeds, strict=True):
    rows = [
      {
        "step": step, "split": "validation", "loss": loss + seed / 2,
        "ponder_steps": (first + 1.0) / 2, "ponder_steps/layer=0": first,
        "ponder_steps/layer=1": 1.0,
      }
      for step, loss, first in ((10, 3.0, 1.5), (20, 2.5, 1.0), (30, 1.5, 3.0))
    ]  # fmt: skip
    log(tmp_path / item.slug, rows)
  markdown = written(tmp_path)[1].read_text()
  (line, *_) = (x for x in markdown.splitlines() if "<small>Loop-3" in x)
  cells = [cell.strip().replace("\u00a0", " ") for cell in line.split("|")[2:]]
  assert cells[0].startswith("2.50 ± 0.50 <small>se 0.29; s0: 2.00")
  assert cells[1] == "– <small>3.27 ± 0.59, all</small>"
  assert cells[2] == "1.0 <small>every seed</small>"  # Layers that began.
  groups = grouping.group_by_seed(plan_of(tmp_path).runs)
  sweep = ADAPTIVE.sweeps["onset"]
  (figure,) = figures_of(monkeypatch, groups, sweep)
  (legend,) = figure.legends
  names = {text.get_text() for text in legend.get_texts()}
  assert {"paper: 3.27 ± 0.59", "ours: 2.50 ± 0.43", "Loop-7"} <= names
  log(tmp_path / items[0].slug, rows[:1])  # No layer of the first seed began.
  markdown = written(tmp_path)[1].read_text()
  (line, *_) = (x for x in markdown.splitlines() if "<small>Loop-3" in x)
  said = line.split("|")[2].replace("\u00a0", " ")
  assert said.strip().startswith("2.75 ± 0.35") and "; without s0<" in said
  left, right = figure.get_axes()[0].get_xlim()
  assert left > right  # Training runs from left to right.


def test_floors_of_word_problems_stand_beside_the_papers_numbers(tmp_path):
  """The highest in the table, each of them with the sizes."""
  items = items_of("passes", file="gsm_sleep")[:1]
  items_lib.write_manifest(tmp_path, "passes", "c.py:smoke", {}, items)
  values = {1: (0.0625, 0.125, 0.0), 2: (0.25, 0.1875, 0.0)}
  data = {
    f"floor/{rule}/operations={number}": value
    for number, found in values.items()
    for rule, value in zip(gsm_task.RULES, found, strict=True)
  }
  make_run(tmp_path / items[0].slug, items[0].config, 0.5, data=data)
  text = written(tmp_path)[1].read_text()
  assert text.count("2 operations, best simple rule, %") == 1  # Ours alone.
  (row,) = (line for line in text.splitlines() if "<small>N = 1<" in line)
  assert "25.0" in row.split("|")[2]
  assert "right by a simple rule, %: lone constant" in text
  assert "1: 12.5, 2: 18.8" in text
  assert "1: 6.2, 2: 25.0" in text
  assert quantities.FLOORS == gsm_task.RULES


def test_the_papers_means_are_those_of_its_seeds():
  checked = 0
  for paper_sweep in UTM.sweeps.values():
    for row in paper_sweep.rows:
      number = row.values.get("exact")
      if number and number.std is not None:
        values = list(number.seeds.values())
        assert statistics.mean(values) == pytest.approx(number.mean, abs=0.051)
        assert statistics.stdev(values) == pytest.approx(number.std, abs=0.051)
        checked += 1
  assert checked > 10
  escaped = [  # Of 13 runs with bias 0, 4 reach more than 20 % (Table 1).
    value > 20
    for row in UTM.sweeps["router_init"].rows
    if row.settings["model.router_bias"] == 0.0
    for value in row.values["exact"].seeds.values()
  ]
  assert (len(escaped), sum(escaped)) == (13, 4)
  # Table 3 of adaptive loops has no bits for SocialIQA and Winogrande.
  stated = ADAPTIVE.sweeps["table_1"].rows[0].values["sense_bpb"].mean
  six = (0.913, 0.846, 0.921, 1.002, 1.163, 0.305)
  assert stated == pytest.approx(statistics.mean(six), abs=2.5e-3)
  for paper, sizes in ((GSM, {"2", "1.4"}), (ADAPTIVE, {"200", "480"})):
    said = {scale.label: scale.paper for scale in paper.scale}["parameters"]
    assert sizes <= set(said.split())


def test_settings_of_one_task_alone_follow_from_its_name():
  """Keeps settings that several tasks have or that alone distinguish runs."""
  of_facts = {"task.name": "facts", "task.people": 8, "run.steps": 30}
  of_sums = {"task.name": "sums", "task.modulus": 11, "run.steps": 60}
  many = {**of_facts, "task.people": 16}

  def keys(*items):
    groups = [
      grouping.Group(
        item, [runs_lib.Run(None, item, {**item, "x.y": 1}, "", {}, {})]
      )
      for item in items
    ]
    return grouping.distinguishing(groups)

  assert keys(of_facts, of_sums) == ["task.name"]
  assert keys(of_facts, of_sums, many) == ["task.name", "task.people"]
  assert keys(of_facts, many) == ["task.people"]


def test_a_row_is_called_by_what_tells_it_apart():
  """Plainest settings first; other differences in small; no bookkeeping."""
  common = {"model.name": "looped", "optim.learning_rate": 0.5}
  loop = {**common, "model.injection": "linear", "model.num_loops": 8}
  once = {**common, "model.injection": "none", "model.num_loops": 1}
  once |= {"eval.every": 9, "run.init_from": "runs/a", "model.qk_norm": True}
  slow = {**loop, "optim.learning_rate": 0.25}
  groups = [
    grouping.Group(x, [runs_lib.Run(None, x, x, "", {}, {})])
    for x in (loop, once, slow)
  ]
  said = [grouping.of_group(group, groups) for group in groups]
  plain = [[text.replace("\u00a0", " ") for text in pair] for pair in said]
  assert plain == [
    ["loops = 8, learning rate = 0.5", "injection = linear"],
    ["loops = 1, learning rate = 0.5", "injection = none"],
    ["loops = 8, learning rate = 0.25", "injection = linear"],
  ]
  assert grouping.of_group(groups[0], groups[:1]) == ("all runs", "")


def test_only_one_varying_number_makes_a_curve():
  def key(name, file="sudoku_utm"):
    runs = [
      runs_lib.Run(None, item.overrides, {}, "not run", {}, {})
      for item in items_of(name, file=file)
    ]
    return plots.numeric_key(grouping.group_by_seed(runs))

  assert key("memory_curve") == "model.num_memory_tokens"
  assert key("depth", "automaton_sleep") == "task.num_steps"
  for name in ("tradeoff", "lambda", "norm", "positions", "width", "ablation"):
    assert key(name) is None


def test_the_page_loads_nothing_and_runs_nothing(workdir):
  html = written(workdir)[0].read_text()
  sources = re.findall(r'(?:src|href)="([^"]*)"', html)
  assert sources
  assert all(source.startswith("data:image/png;base64,") for source in sources)
  # On a phone a picture has three fifths of its width, at least.
  assert html.count('style="--drawn: ') == html.count("<img")
  assert 'style="--drawn: 1px"' in html
  assert "width: max(100%, .6 * var(--drawn))" in html
  assert "<script" not in html
  assert "@import" not in html
  assert "url(" not in html
  assert "prefers-color-scheme: dark" in html


def test_markdown_links_to_files_that_are_there(workdir):
  text = written(workdir)[1].read_text()
  links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
  # Of this directory: another one may have a sweep of the same name.
  picture = f"report_figures/{workdir.name}-memory_curve.png"
  assert any(picture in link for link in links)
  for link in links:
    path = re.sub("%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), link)
    assert (workdir / path).is_file()


def test_values_are_escaped(workdir):
  bad = "<img src=x onerror=alert(1)>|`"
  run = plan_of(workdir).runs[0]
  summary = {**run.summary, "command": bad, "devices": bad, "revision": bad}
  workdir_lib.write_json(run.directory / "summary.json", summary)
  manifest = {
    "sweep": bad,
    "config": bad,
    "model": bad,
    "items": [
      {
        "overrides": {"model.x": bad},
        "directory": bad,
        "config": {"model": {"name": bad}},
      }
    ],
  }
  workdir_lib.write_json(workdir / "sweep-<img src=x>.json", manifest)
  html, markdown = (path.read_text() for path in written(workdir))
  assert "<img src=x" not in html
  assert "&lt;img src=x onerror" in html
  outside_code = re.sub(r"(?s)(`{3,})\n.*?\n\1", "", markdown)
  assert "<img src=x" not in outside_code
  assert r"\|\`" in outside_code


def test_a_single_run(workdir):
  single = plan_of(workdir).runs[0].directory
  html, markdown = (path.read_text() for path in written(single))
  # Results, figure and command; the rest can be expanded.
  card, folded = markdown.split("<details>", 1)
  headline = "## exact match 0.1 ± 0.01 on 520 test examples; 3,447 parameters"
  assert f"{headline}, 30 s" in card
  assert "ponder\\_steps 2.5" in card
  size = plan_of(workdir).runs[0].config["run"]["batch_size"]
  assert size != 20
  assert f"20 steps of {size} examples on 1 x cpu" in card
  assert "](figures/curves.png)" in card
  assert "python -m loopjax.main" in card
  assert "<summary>All scores (3)</summary>" in folded
  assert "0.1 ± 0.01" in folded
  assert "exact match 0.1 ± 0.01" in html
  summary = {k: x for k, x in summary_of(single).items() if k[:4] != "wall"}
  workdir_lib.write_json(single / "summary.json", summary)  # As of an import.
  assert "3,447 parameters\n" in written(single)[1].read_text()
  unfinished = plan_of(workdir).runs[4].directory
  assert "incomplete, step 10 of 20" in written(unfinished)[0].read_text()


def test_a_card_has_scores_by_number_of_loops(workdir):
  """For 1, 2, 4, ... loops, the trained number and the last."""
  run = plan_of(workdir).runs[0]
  trained = run.config["model"]["num_loops"]
  metrics = {f"depth/loss/loop={k}": k + 0.5 for k in range(2 * trained)}
  metrics |= {
    f"depth/loss/standard_error/loop={k}": 0.25 for k in range(2 * trained)
  }
  metrics |= {"depth/injection_radius": 0.75}
  summary = {**run.summary, "metrics": {**run.summary["metrics"], **metrics}}
  workdir_lib.write_json(run.directory / "summary.json", summary)
  markdown = written(run.directory)[1].read_text()
  powers = [2**n for n in range(10) if 2**n <= 2 * trained]
  shown = sorted({*powers, trained, 2 * trained})
  assert f"<summary>By number of loops ({len(shown)})</summary>" in markdown
  assert f"| {trained} (trained) | {trained - 0.5:g} ± 0.25 |" in markdown
  assert "| depth/injection\\_radius | 0.75 |" in markdown
  assert "depth/loss" not in markdown


def test_the_picture_of_a_card_shows_how_the_model_thinks(workdir):
  single = plan_of(workdir).runs[0].directory
  for name in ("attention", "depth", "puzzle"):
    (single / "figures" / f"{name}.png").write_bytes(PNG)
  card, folded = written(single)[1].read_text().split("<details>", 1)
  shown = re.findall(r"figures/(\w+)\.png", card)
  assert shown == ["puzzle", "curves"]
  assert "More figures (2)" in folded


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("summary.json", ""),
    ("summary.json", "{}"),
    ("summary.json", '{"status": ["completed"]}'),
    ("summary.json", '{"status": "completed", "parameters": 1, "steps": 1}'),
    ("config.json", '{"model": {'),
    ("config.json", '{"model": {}, "task": {}, "run": {}}'),
    ("metrics.jsonl", None),
  ],
)
def test_a_damaged_run_is_named_and_the_others_are_reported(
  name, text, workdir, capsys
):
  """Of three runs; a report and a table have the numbers of two."""
  runs = workdir / "by_hand"
  config = plan_of(workdir).runs[0].config
  for seed in range(3):
    its = {**config, "run": {**config["run"], "seed": seed}}
    make_run(runs / f"s{seed}", its, 0.25 * seed)
  path = runs / "s1" / name
  path.unlink(missing_ok=True)
  if text is None:
    path.mkdir()
  else:
    path.write_text(text)
  wanted = f"error: {path.parent}: damaged: {name}: "
  assert command.main([str(runs), f"--out={workdir / 'out'}"]) == 2
  said = capsys.readouterr()
  assert said.err.startswith(wanted) and said.err.count("\n") == 1
  lines = (workdir / "out/report.csv").read_text().splitlines()
  assert ["s0,completed" in lines[1], "s2,completed" in lines[3]] == [True] * 2
  assert table.main([str(runs), "--metric=test/exact_match"]) == 2
  assert table.main([str(runs), "--rows=run.batch_size", "--csv"]) == 2
  said = capsys.readouterr()
  assert said.err.count(wanted) == said.err.count("\n") == 2
  assert "0.25" in said.out  # The mean of 0 and 0.5.
  with pytest.raises(UserError, match=f"damaged: {name}"):
    runs_lib.check_readable([runs_lib.read_run(path.parent, {}, {})])
  assert command.main([str(path.parent)]) == 2
  assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_manifest_is_named(tmp_path):
  (tmp_path / "sweep-x.json").write_text("[1]")
  with pytest.raises(UserError, match="sweep-x.json"):
    written(tmp_path)


@pytest.mark.parametrize(
  ("value", "error", "text"),
  [
    (0.95678, 0.0123, "0.9568 ± 0.012"),
    (9999.4, None, "9,999"),
    (9999.6, None, "10,000"),
    (-12345.6, None, "-12,346"),
  ],
)
def test_scores_have_no_exponent(value, error, text):
  assert records.score(value, error) == text


def test_every_picture_has_words_and_a_run_its_name(workdir):
  drawn = [*figures.FIGURES, *itertools.chain(*figures.TASK_FIGURES.values())]
  assert {figure.name for figure in drawn} <= page._CAPTIONS.keys()
  single = plan_of(workdir).runs[0].directory
  markdown = written(single)[1].read_text()
  assert markdown.startswith(f"# {single.name}".replace("_", r"\_"))
  assert "Training: loss, scores and loops by step" in markdown
