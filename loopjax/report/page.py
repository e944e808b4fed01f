"""The whole report: report.html, report.md and report.csv."""

import itertools
import pathlib
from collections.abc import Sequence

from loopjax.commands import document
from loopjax.errors import writing
from loopjax.report import card, grouping, papers, rows, tables
from loopjax.report import runs as runs_lib

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
  title = "Our runs and the papers' numbers"
  html, markdown, data = (out / f"report.{x}" for x in ("html", "md", "csv"))
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
    blocks = [
      document.Heading(1, title),
      *_body(out, plans, others),
    ]
    html.write_text(document.to_html(title, blocks))
    markdown.write_text(document.to_markdown(blocks))
    data.write_text(rows.to_csv(plans))
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
  return [*blocks, _missing(plans)]


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


def _missing(plans: Sequence[runs_lib.Plan]) -> document.Fold:
  """The papers' tables and figures for which there is no sweep."""
  absent = rows.missing(plans)
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
  return document.Fold(f"{title} numbers", [table])


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
