"""The whole report: WORKDIR/report.html and WORKDIR/report.md."""

import itertools
import pathlib
from collections.abc import Sequence

from loopjax import document
from loopjax.errors import UserError
from loopjax.report import papers, sections, tables

MAX_RUNS_WITH_FIGURES = 6

_LEGEND = (
  "“Ours” are runs in this directory. “Paper” are numbers that a paper prints;"
  " they were not run here, and mostly at another scale. A number is the mean"
  " over seeds ± the sample standard deviation; the small print has the single"
  " seeds."
)


def write(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Writes the report about a directory of runs, or about a single run.

  Returns:
    The paths of the HTML page and of the Markdown text.

  Raises:
    UserError: there is nothing to report, or the report cannot be written.
  """
  plans, others = tables.collect(workdir)
  plans.sort(key=_place)
  title = f"loopjax: {workdir.resolve().name}"
  html, markdown = workdir / "report.html", workdir / "report.md"
  try:
    blocks = [
      document.Heading(1, title),
      *_body(workdir, plans, others),
    ]
    html.write_text(document.to_html(title, blocks))
    markdown.write_text(document.to_markdown(blocks))
  except OSError as error:
    raise UserError(
      f"{workdir}: cannot be written: {error.strerror}"
    ) from error
  return [html, markdown]


def _body(
  workdir: pathlib.Path,
  plans: Sequence[tables.Plan],
  others: Sequence[tables.Run],
) -> list[document.Block]:
  if not plans and [run.directory for run in others] == [workdir]:
    figures = _figures(others[0], workdir)
    return [*sections.run_blocks(others[0]), *figures]
  blocks: list[document.Block] = [document.Paragraph(_LEGEND)]
  for task, model in sorted({(plan.task, plan.model) for plan in plans}):
    if paper := papers.of(task, model):
      blocks.append(document.Bullets(paper.caveats))
  for plan in plans:
    blocks += sections.sweep_blocks(plan, workdir / "report_figures")
  if others:
    blocks += [
      document.Heading(2, "Runs of no sweep"),
      sections.runs_block(others),
      sections.commands_block(others),
    ]
  folds = [
    document.Fold(f"{run.directory.name} (figures: {len(figures)})", figures)
    for run in _representatives(plans, others)
    if (figures := _figures(run, workdir))
  ]
  if folds:
    heading = document.Heading(2, "Figures of single runs")
    blocks += [heading, *folds[:MAX_RUNS_WITH_FIGURES]]
  return blocks


def _place(plan: tables.Plan) -> tuple[str, int, str]:
  """Sort key: the paper's order; other sweeps come last."""
  paper = papers.of(plan.task, plan.model)
  known = list(paper.sweeps) if paper else []
  place = known.index(plan.name) if plan.name in known else len(known)
  return plan.task, place, plan.name


def _representatives(
  plans: Sequence[tables.Plan], others: Sequence[tables.Run]
) -> list[tables.Run]:
  """One run per setting, taken from the sweeps in turn, without repetition."""
  by_sweep = [
    [
      next((run for run in group.runs if run.done), None)
      for group in tables.group_by_seed(plan.runs)
    ]
    for plan in plans
  ]
  turns = itertools.chain(*itertools.zip_longest(*by_sweep), others)
  return list({run.directory: run for run in turns if run}.values())


def _figures(run: tables.Run, workdir: pathlib.Path) -> list[document.Block]:
  return [
    document.Image(
      path.read_bytes(), path.relative_to(workdir).as_posix(), path.stem
    )
    for path in sorted((run.directory / "figures").glob("*.png"))
  ]
