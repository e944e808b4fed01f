"""The whole report: report.html, report.md and report.csv."""

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from loopjax.commands import document
from loopjax.errors import writing
from loopjax.report import card, grouping, papers, records, table, tables
from loopjax.report import paper as paper_lib
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
    The paths of the HTML page, the Markdown text, the final scores of the runs
    as CSV, and, if there are sweeps of papers, their numbers in papers.csv.

  Raises:
    UserError: there is nothing to report, or the report cannot be written.
  """
  plans, others = runs_lib.collect(workdirs)
  plans.sort(key=_place)
  alone = not plans and len(others) == 1
  name = others[0].directory.resolve().name if alone else ""
  title = name or "Our runs and the papers' numbers"
  html, markdown, data = (out / f"report.{x}" for x in ("html", "md", "csv"))
  theirs, written = list(_numbers(plans)), [html, markdown, data]
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
    blocks = [
      document.Heading(1, title),
      *_body(out, plans, others),
    ]
    html.write_text(document.to_html(title, blocks))
    markdown.write_text(document.to_markdown(blocks))
    runs = runs_lib.each_once(plans, others)
    data.write_text(table.to_csv(records.records(runs)))
    if theirs:
      written.append(out / "papers.csv")
      written[-1].write_text(table.to_csv(theirs))
  return written


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
  absent = [
    (paper, name) for paper, name, here in _of_papers(plans) if not here
  ]
  if not absent:
    return []
  found = document.Table(
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
  title = f"Not run here: {len(absent)} comparisons; papers.csv has the papers'"
  return [document.Fold(f"{title} numbers", [found])]


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


def _of_papers(
  plans: Iterable[runs_lib.Plan],
) -> list[tuple[paper_lib.Paper, str, bool]]:
  """(paper, sweep, whether it is here) of the papers with a sweep here."""
  here = {
    (id(paper), plan.name)
    for plan in plans
    if (paper := papers.of(plan.task, plan.model))
  }
  known = {id(paper): paper for paper in papers.PAPERS.values()}
  found = [
    (paper, name, (key, name) in here)
    for key, paper in known.items()
    for name in paper.sweeps
  ]
  reported = {paper.name for paper, _, is_here in found if is_here}
  return [one for one in found if one[0].name in reported]


def _numbers(plans: Iterable[runs_lib.Plan]) -> Iterator[dict[str, Any]]:
  """All numbers of these papers, a record each."""
  for paper, name, _ in _of_papers(plans):
    sweep = paper.sweeps[name]
    for row in sweep.rows:
      for column in sweep.columns:
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
