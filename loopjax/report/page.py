"""The whole report: report.html, report.md and report.csv.

Of a single run it is a card; of several, a table for every sweep, our numbers
next to the paper's.
"""

import collections
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from loopjax.commands import document, ending
from loopjax.commands.document import cell, plain
from loopjax.data import TASKS
from loopjax.errors import writing
from loopjax.models import MODELS
from loopjax.report import grouping, papers, records, tables
from loopjax.report import runs as runs_lib
from loopjax.report.records import score
from loopjax.run import durations

MAX_RUNS_WITH_FIGURES = 6

_WORDS = (
  "Reproduced: the paper's finding shows in at least three seeds that were not"
  " used to choose anything, the confidence interval of the difference excludes"
  " 0, and the side that wins was not trained for longer. Same direction: one"
  " of these conditions is not met, or the effect is smaller, or the task lacks"
  " what the claim is about. Not here: tried, and absent. A dash: no paper"
  " makes this claim. Each question links to its numbers."
)
_LEGEND = (
  "“Ours” are runs in this directory. “Paper” are numbers that a paper prints;"
  " they were not run here, and mostly at another size. Unless stated"
  " otherwise, scores are on the test split: the mean over seeds ± the sample"
  " standard deviation. Small print: the standard error (se) over seeds, or"
  " over examples for a single seed; the seeds (s1 is seed 1); the paper's name"
  " for a row; other settings that differ. Runs of the paper's size have a"
  " verdict: numbers agree if they differ by at most two standard errors of"
  " both, where a single run of a paper counts as exact; columns in which"
  " neither error is known decide nothing. In a search, the rows that"
  " validation chose are marked."
)
_OTHER = "Other tasks"


def write(
  found: tuple[list[runs_lib.Plan], list[runs_lib.Run]], out: pathlib.Path
) -> list[pathlib.Path]:
  """Writes a report on the sweeps and runs that `runs.collect` has found.

  Returns:
    The paths of the HTML page, the Markdown text, the final scores of the runs
    as CSV, and, if there are sweeps of papers, their numbers in papers.csv.
  """
  plans, others = sorted(found[0], key=_place), found[1]
  alone = not plans and len(others) == 1
  name = others[0].directory.resolve().name if alone else ""
  title = name or "Our runs and the papers' numbers"
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
    body = card(others[0], out) if alone else _report(out, plans, others)
    markdown = document.text([document.heading(1, title), *body])
    runs = runs_lib.each_once(plans, others)
    texts = {
      "report.html": document.to_html(title, markdown, out),
      "report.md": markdown,
      "report.csv": records.to_csv(records.records(runs)),
    }
    if theirs := list(_numbers(plans)):
      texts["papers.csv"] = records.to_csv(theirs)
    for file, text in texts.items():
      (out / file).write_text(text, encoding="utf-8")
  return [out / file for file in texts]


def _report(
  out: pathlib.Path,
  plans: Sequence[runs_lib.Plan],
  others: Sequence[runs_lib.Run],
) -> Iterator[str]:
  """The parts of a report on several runs."""
  yield from _contents(plans)
  yield plain(_LEGEND)
  stems: list[str] = []
  of_papers = itertools.groupby(plans, key=_chapter_of)
  for name, chapter in ((name, list(some)) for name, some in of_papers):
    there = [plan.paper for plan in chapter if plan.paper]
    caveats = dict.fromkeys(x for paper in there for x in paper.caveats)
    yield document.heading(2, name)
    yield plain(" ".join(dict.fromkeys(paper.about for paper in there)))
    yield document.bullets(caveats)
    for plan in chapter:
      stem = f"{plan.directory.resolve().name}-{plan.name}"
      stems.append(stem)
      if (number := stems.count(stem)) > 1:  # The same sweep elsewhere.
        stem += f"-{number}"
      parts = tables.sweep_parts(plan, out, f"report_figures/{stem}")
      if plan.chosen_for is None:
        yield from [document.heading(3, tables.title_of(plan)), *parts]
      else:
        yield document.fold(f"Search. {tables.title_of(plan)}", *parts)
  if others:
    yield document.heading(2, "Runs outside sweeps")
    header = ["run", "ours: result", "state"]
    yield document.table(header, map(tables.listed, others))
    yield tables.commands(others)
  drawn = [
    document.fold(f"{run.directory.name} (figures: {len(found)})", *found)
    for run in _one_of_each(plans, others)
    if (found := list(figures(run, out).values()))
  ]
  if drawn:
    yield document.heading(2, "Figures of single runs")
    yield from drawn[:MAX_RUNS_WITH_FIGURES]
  yield _missing(plans)


def _chapter_of(plan: runs_lib.Plan) -> str:
  return plan.paper.name if plan.paper else _OTHER


def _place(plan: runs_lib.Plan) -> tuple[str, str, int, str]:
  """Sort key: by paper, in its order; other sweeps come last."""
  paper = plan.paper
  known = list(paper.sweeps) if paper else []
  place = known.index(plan.name) if plan.name in known else len(known)
  return paper.name if paper else "~", plan.task, place, plan.name


def _contents(plans: Sequence[runs_lib.Plan]) -> list[str]:
  """The questions, with verdicts, if stored runs have them."""
  asked = [plan for plan in plans if plan.chosen_for is None]
  if len(asked) < 2:
    return []
  said = any(plan.verdict for plan in asked)
  rows = []
  for plan in asked:
    done = [run for run in plan.runs if run.done]
    seeds = {run.config["run"]["seed"] for run in done}
    of = f"{len(done)} of " * (len(done) < len(plan.runs))
    counts = f"{of}{_count(plan.runs, 'run')}, {_count(seeds, 'seed')}"
    link = f"{document.link(tables.title_of(plan))} <small>{counts}</small>"
    rows.append([link, plain(plan.verdict or "–")][: 1 + said])
  return [
    document.heading(2, "Verdicts" if said else "Contents"),
    plain(_WORDS) if said else "",
    document.table(["question", "verdict"][: 1 + said], rows),
  ]


def _count(things: Sized, name: str) -> str:
  """ "1 seed" or "2 seeds"."""
  return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _one_of_each(
  plans: Sequence[runs_lib.Plan], others: Sequence[runs_lib.Run]
) -> list[runs_lib.Run]:
  """One run per setting, taken from the sweeps in turn, without repetition."""
  by_sweep = [
    [
      next((run for run in group.runs if run.done), None)
      for group in grouping.group_by_seed(plan.runs)
    ]
    for plan in plans
  ]
  turns = itertools.chain(*itertools.zip_longest(*by_sweep), others)
  return runs_lib.each_once((), filter(None, turns))


def _of_papers(
  plans: Iterable[runs_lib.Plan],
) -> list[tuple[papers.Paper, str, bool]]:
  """(paper, sweep, whether it is here) of the papers with a sweep here."""
  here = {(id(plan.paper), plan.name) for plan in plans if plan.paper}
  known = {id(paper): paper for paper in papers.PAPERS.values()}
  found = [
    (paper, name, (key, name) in here)
    for key, paper in known.items()
    for name in paper.sweeps
  ]
  reported = {paper.name for paper, _, is_here in found if is_here}
  return [one for one in found if one[0].name in reported]


def _missing(plans: Sequence[runs_lib.Plan]) -> str:
  """The rest of the papers' tables and figures, if there are any."""
  rows = [
    [plain(paper.name), cell(sweep.title, sweep.source), plain(name)]
    for paper, name, here in _of_papers(plans)
    for sweep in [paper.sweeps[name]]
    if not here
  ]
  if not rows:
    return ""
  title = f"Not run here: {len(rows)} comparisons; papers.csv has the papers'"
  table = document.table(["paper", "comparison", "sweep"], rows)
  return document.fold(f"{title} numbers", table)


def _numbers(plans: Iterable[runs_lib.Plan]) -> Iterator[dict[str, Any]]:
  """All numbers of these papers, a record each."""
  for paper, name, _ in _of_papers(plans):
    sweep = paper.sweeps[name]
    for row, column in itertools.product(sweep.rows, sweep.columns):
      if number := row.values.get(column.key):
        yield {
          "paper": paper.name,
          "source": sweep.source,
          "sweep": name,
          "row": row.label,
          "quantity": column.label,
          "mean": number.mean,
          "std": number.std,
          "seeds": len(number.seeds) or None,
          "says": number.text,
        }


# What shows best how a model thinks, of the figures that a run may have.
_PICTURES = ("puzzle", "passes", "exit_curve", "loops", "depth")
_CAPTIONS = {
  "attention": "What tokens attend to, mean over heads, at three loops",
  "attention_heads": "What tokens attend to by head, in the last loop",
  "curves": "Training: loss, scores and loops by step",
  "depth": "Scores after each loop, also beyond the trained number",
  "exit_curve": "Loss against the loops that tokens run, by exit threshold",
  "exits": "Iterations and score if tokens halt earlier",
  "halting": "How many tokens halt after how many loops",
  "halting_map": "Loops until each cell halts",
  "loops": "Iterations of each layer over training, and its loop scales",
  "memory": "Memory banks: gates, and slots that are read",
  "passes": "Norms after every pass, and what fast weights retain",
  "puzzle": "A test puzzle after each loop",
  "puzzle_failed": "A test puzzle that the model does not solve",
  "router": "Halting probability by loop, during training and at its end",
  "skipping": "Loss against loops that tokens run, if later ones are skipped",
}
_BY_DEPTH = re.compile(r"depth/(.+)/loop=(\d+)")


def card(run: runs_lib.Run, out: pathlib.Path) -> list[str]:
  """The report of a single run: what it reached, how it looks, what it took.

  Everything else, all scores and the paper's scale, can be expanded below. The
  run may not be complete; `out` is the folder of the document.
  """
  drawn = figures(run, out)
  first = next(filter(drawn.get, _PICTURES), "")
  shown = [drawn.pop(name, "") for name in (first, "curves")]
  command = run.summary.get("command")
  more = f"More figures ({len(drawn)})"
  return [
    *(_reached(run) if run.done else [f"State: {plain(run.state)}."]),
    *shown,
    document.code(command) if command else "",
    document.fold(more, *drawn.values()) if drawn else "",
    *_all_scores(run),
    tables.sizes([run], run.paper),
  ]


def figures(run: runs_lib.Run, out: pathlib.Path) -> dict[str, str]:
  """The figures of a run, by name, with their paths from `out`."""
  there = os.path.relpath(run.directory.resolve(), out.resolve())
  return {
    path.stem: document.image(
      pathlib.PurePath(there, "figures", path.name),
      _CAPTIONS.get(path.stem, path.stem.replace("_", " ").capitalize()),
    )
    for path in sorted((run.directory / "figures").glob("*.png"))
    if path.is_file()
  }


def _reached(run: runs_lib.Run) -> list[str]:
  """The score that matters most, a line for each split, and what it took."""
  summary, config = run.summary, run.config
  task, model = (config[part]["name"] for part in ("task", "model"))
  names = [
    *(TASKS[task].HEADLINE if task in TASKS else ()),
    *(MODELS[model].headline if model in MODELS else ()),
  ]
  found = summary["metrics"]
  line = f"{summary['parameters']:,} parameters"
  if seconds := summary.get("wall_seconds"):  # Nothing trains an import.
    line += f", {durations.text(seconds)}"
  if names and (best := f"test/{names[0]}") in found:
    value = score(found[best], found.get(best + papers.ERROR))
    count = found.get("test/count")
    on = "" if count is None else f" on {count:,.0f} test examples"
    line = f"{names[0].replace('_', ' ')} {value}{on}; {line}"
  on = f" on {summary['devices']}" if "devices" in summary else ""
  cost = (
    f"Family {model}, task {task}: {summary['steps']:,} steps of"
    f" {config['run']['batch_size']:,} examples{on}. Versions, revision and"
    " sizes: below."
  )
  lines = ending.scores(found, names)
  return [document.heading(2, line), document.bullets(lines), plain(cost)]


def _all_scores(run: runs_lib.Run) -> Iterator[str]:
  """All scores: by number of loops, of all examples together, by group.

  Those after 1, 2, 4, ... loops, the trained number and the last are shown.
  """
  found = run.summary.get("metrics", {})
  by_loop: dict[int, dict[str, str]] = collections.defaultdict(dict)
  others: dict[bool, list[list[str]]] = {False: [], True: []}
  for name, value in found.items():
    if match := _BY_DEPTH.fullmatch(name):
      if not match[1].endswith(papers.ERROR):
        error = found.get(f"depth/{match[1]}{papers.ERROR}/loop={match[2]}")
        by_loop[int(match[2]) + 1][match[1]] = score(value, error)
    elif not name.startswith("train/") and not name.endswith(papers.ERROR):
      text = score(value, found.get(name + papers.ERROR))
      others["=" in name].append([plain(name), text])
  trained = run.config.get("model", {}).get("num_loops")
  last = max(by_loop, default=0)
  names = list(dict.fromkeys(name for of in by_loop.values() for name in of))
  rows = [
    [
      f"{k} (trained)" if k == trained else str(k),
      *(by_loop[k].get(name, "") for name in names),
    ]
    for k in sorted(by_loop)
    if k & (k - 1) == 0 or k in (trained, last)
  ]
  if rows:
    header = ["loops", *(plain(name.replace("_", " ")) for name in names)]
    table = document.table(header, rows)
    yield document.fold(f"By number of loops ({len(rows)})", table)
  for title, some in zip(
    ("All scores", "Scores by group"), others.values(), strict=True
  ):
    if some:
      table = document.table(["score", "mean ± standard error"], some)
      yield document.fold(f"{title} ({len(some)})", table)
