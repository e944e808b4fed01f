"""The whole report: report.html, report.md and report.csv."""

import csv
import io
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from loopjax.commands import document
from loopjax.errors import writing
from loopjax.report import card, grouping, papers, tables
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report import settings as settings_lib

MAX_RUNS_WITH_FIGURES = 6

_WORDS = (
  "Reproduced: the paper's finding shows in at least three seeds that were not"
  " used to choose anything, and the confidence interval of the difference"
  " excludes 0. Same direction: a smaller effect, an easier task, fewer seeds,"
  " or within the error. Not here: tried, and absent. A dash: no paper makes"
  " this claim. Each question links to its numbers."
)
_LEGEND = (
  "“Ours” are runs in this directory. “Paper” are numbers that a paper prints;"
  " they were not run here, and mostly at another size. Unless stated"
  " otherwise, scores are on the test split: the mean over seeds ± the sample"
  " standard deviation. Small print: the standard error (se) over seeds, or"
  " over examples for a single seed; the seeds (s1 is seed 1); the paper's name"
  " for a row; other settings that differ. Runs of the paper's size have a"
  " verdict: numbers agree if they differ by at most two standard errors of"
  " both, where a single run of a paper counts as exact. In a search, the rows"
  " that validation chose are marked."
)
_OTHER = "Other tasks"


def write(
  workdirs: Sequence[pathlib.Path], out: pathlib.Path
) -> list[pathlib.Path]:
  """Writes a report on work directories.

  Args:
    workdirs: work directories of runs and sweeps, or folders of these.
    out: output folder; created if it does not exist.

  Returns:
    The paths of the HTML page, the Markdown text, and the numbers as CSV.

  Raises:
    UserError: there is nothing to report, or the report cannot be written.
  """
  plans, others = runs_lib.collect(workdirs)
  plans.sort(key=_place)
  alone = not plans and len(others) == 1
  name = others[0].directory.resolve().name if alone else ""
  title = name or "Our runs and the papers' numbers"
  html, markdown, data = (out / f"report.{x}" for x in ("html", "md", "csv"))
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
    blocks = [
      document.Heading(1, title),
      *_body(out, plans, others),
    ]
    html.write_text(document.to_html(title, blocks))
    markdown.write_text(document.to_markdown(blocks))
    data.write_text(to_csv(plans))
  return [html, markdown, data]


def _body(
  out: pathlib.Path,
  plans: Sequence[runs_lib.Plan],
  others: Sequence[runs_lib.Run],
) -> list[document.Block]:
  if not plans and len(others) == 1:
    return card.blocks(others[0], out)
  blocks = [*_contents(plans), document.Paragraph(_LEGEND)]
  chapters: dict[str, list[runs_lib.Plan]] = {}
  for plan in plans:
    paper = papers.of(plan.task, plan.model)
    chapters.setdefault(paper.name if paper else _OTHER, []).append(plan)
  stems: list[str] = []
  for name, of_paper in chapters.items():
    blocks += _chapter(name, of_paper)
    for plan in of_paper:
      stem = f"{plan.directory.resolve().name}-{plan.name}"
      stems.append(stem)
      if (number := stems.count(stem)) > 1:  # The same sweep elsewhere.
        stem += f"-{number}"
      heading, *rest = tables.sweep_blocks(plan, out / "report_figures" / stem)
      if plan.chosen_for is None:
        blocks += [heading, *rest]
      else:
        blocks.append(document.Fold(f"Search. {tables.title(plan)}", rest))
  if others:
    blocks += [
      document.Heading(2, "Runs outside sweeps"),
      tables.runs_block(others),
      tables.commands_block(others),
    ]
  folds = [
    document.Fold(f"{run.directory.name} (figures: {len(figures)})", figures)
    for run in _representatives(plans, others)
    if (figures := list(card.figures(run, out).values()))
  ]
  if folds:
    heading = document.Heading(2, "Figures of single runs")
    blocks += [heading, *folds[:MAX_RUNS_WITH_FIGURES]]
  return [*blocks, *_missing(plans)]


def _contents(plans: Sequence[runs_lib.Plan]) -> list[document.Block]:
  """The questions, with verdicts where whoever kept the runs gave one."""
  asked = [plan for plan in plans if plan.chosen_for is None]
  if len(asked) < 2:
    return []
  said = any(plan.verdict for plan in asked)
  header = ("question", "verdict") if said else ("question",)
  rows = []
  for plan in asked:
    done = [run for run in plan.runs if run.done]
    seeds = {run.config["run"]["seed"] for run in done}
    counts = f"{len(done)} of {len(plan.runs)} runs, {len(seeds)} seeds"
    heading = tables.title(plan)
    rows.append(
      [
        document.Cell(heading, counts, to=heading),
        document.Cell(plan.verdict or "–"),
      ][: len(header)]
    )
  return [
    document.Heading(2, "Verdicts" if said else "Contents"),
    *([document.Paragraph(_WORDS)] if said else []),
    document.Table([document.Cell(text) for text in header], rows),
  ]


def _chapter(name: str, plans: Sequence[runs_lib.Plan]) -> list[document.Block]:
  """Heading of a paper's tables, what it is about, and caveats of them all."""
  there = [papers.of(plan.task, plan.model) for plan in plans]
  said = dict.fromkeys(paper.about for paper in there if paper)
  caveats = dict.fromkeys(x for paper in there if paper for x in paper.caveats)
  return [
    document.Heading(2, name),
    *([document.Paragraph(" ".join(said))] if said else []),
    *([document.Bullets(tuple(caveats))] if caveats else []),
  ]


def _missing(plans: Sequence[runs_lib.Plan]) -> list[document.Block]:
  """The rest of the papers' tables and figures, if there are any."""
  absent = missing(plans)
  if not absent:
    return []
  table = document.Table(
    [document.Cell(text) for text in ("paper", "comparison", "sweep")],
    [
      [
        document.Cell(paper.name),
        document.Cell(paper.sweeps[name].title, paper.sweeps[name].source),
        document.Cell(name),
      ]
      for paper, name in absent
    ],
  )
  title = f"Not run here: {len(absent)} comparisons; report.csv has the papers'"
  return [document.Fold(f"{title} numbers", [table])]


def _place(plan: runs_lib.Plan) -> tuple[str, str, int, str]:
  """Sort key: by paper, in its order; other sweeps come last."""
  paper = papers.of(plan.task, plan.model)
  known = list(paper.sweeps) if paper else []
  place = known.index(plan.name) if plan.name in known else len(known)
  return paper.name if paper else "~", plan.task, place, plan.name


def _representatives(
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
  return list({run.directory: run for run in turns if run}.values())


COLUMNS = (
  "paper", "source", "sweep", "directory", "setting", "row", "quantity",
  "verdict", "ours", "ours_std", "ours_standard_error", "ours_seeds",
  "evaluated", "steps", "parameters", "wall_seconds", "paper_mean", "paper_std",
  "paper_seeds", "paper_says", "command",
)  # fmt: skip


def to_csv(plans: Sequence[runs_lib.Plan]) -> str:
  """All numbers of the sweeps, and what `missing` has of the papers."""
  text = io.StringIO()
  writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
  writer.writeheader()
  for plan in plans:
    writer.writerows(_of_plan(plan))
  for paper, name in missing(plans):
    sweep = paper.sweeps[name]
    for row in sweep.rows:
      for column in sweep.columns:
        writer.writerow(
          _about(paper, sweep, name)
          | {"row": row.label, "quantity": column.label, "verdict": "not run"}
          | _theirs(row, column)
        )
  return text.getvalue()


def missing(
  plans: Sequence[runs_lib.Plan],
) -> list[tuple[paper_lib.Paper, str]]:
  """(paper, sweep) of tables and figures for which there is no sweep.

  Only of papers for which there is another of their sweeps.
  """
  there = {
    (id(paper), plan.name)
    for plan in plans
    if (paper := papers.of(plan.task, plan.model))
  }
  known = {id(paper): paper for paper in papers.PAPERS.values()}
  reported = {
    paper.name
    for key, paper in known.items()
    if any((key, name) in there for name in paper.sweeps)
  }
  return [
    (paper, name)
    for key, paper in known.items()
    for name in paper.sweeps
    if paper.name in reported and (key, name) not in there
  ]


def _of_plan(plan: runs_lib.Plan) -> Iterator[dict[str, Any]]:
  """The numbers of a sweep."""
  paper = papers.of(plan.task, plan.model)
  sweep = tables.sweep_of(plan, paper)
  groups = grouping.group_by_seed(plan.runs)
  keys = settings_lib.varying(groups)
  for group in groups:
    row = grouping.row_of(group.settings, sweep.rows)
    changed = {k: v for k, v in group.overrides.items() if k in keys}
    done = [run.summary for run in group.runs if run.done]
    facts: dict[str, Any] = {
      "directory": plan.directory.as_posix(),
      "setting": ", ".join(f"{k}={v}" for k, v in changed.items()),
      "row": row.label if row else "",
      "verdict": grouping.verdict(group, sweep, paper) if paper else "",
      "command": plan.command,
    }
    if done:
      first = done[0]
      walls = [s["wall_seconds"] for s in done if "wall_seconds" in s]
      facts |= {
        "evaluated": first.get("metrics", {}).get("test/count"),
        "steps": first.get("steps"),
        "parameters": first.get("parameters"),
        "wall_seconds": statistics.fmean(walls) if walls else None,
      }
    for column in sweep.columns:
      cells = _about(paper, sweep, plan.name) | facts
      cells["quantity"] = column.label
      if mine := grouping.ours(group, column):
        cells |= {
          "ours": mine.mean,
          "ours_std": mine.std,
          "ours_standard_error": mine.standard_error,
          "ours_seeds": len(mine.seeds),
        }
      yield cells | (_theirs(row, column) if row else {})


def _about(
  paper: paper_lib.Paper | None, sweep: paper_lib.Sweep, name: str
) -> dict[str, Any]:
  return {
    "paper": paper.name if paper else "",
    "source": sweep.source,
    "sweep": name,
  }


def _theirs(row: paper_lib.Row, column: paper_lib.Column) -> dict[str, Any]:
  """The paper's number."""
  number = row.values.get(column.key)
  if number is None:
    return {}
  return {
    "paper_mean": number.mean,
    "paper_std": number.std,
    "paper_seeds": len(number.seeds) or None,
    "paper_says": number.text,
  }
