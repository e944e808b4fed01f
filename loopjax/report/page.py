"""The whole report: report.html, report.md and report.csv.

Of a single run it is a card; of several, a table for every sweep.
"""

import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loopjax.commands import document, ending
from loopjax.commands.document import Cell
from loopjax.data import TASKS
from loopjax.errors import writing
from loopjax.models import MODELS
from loopjax.report import grouping, papers, records, table, tables
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report.tables import score
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

  Raises:
    UserError: the report cannot be written.
  """
  plans, others = sorted(found[0], key=_place), found[1]
  alone = not plans and len(others) == 1
  name = others[0].directory.resolve().name if alone else ""
  title = name or "Our runs and the papers' numbers"
  html, markdown, data = (out / f"report.{x}" for x in ("html", "md", "csv"))
  with writing(out):
    out.mkdir(parents=True, exist_ok=True)
    blocks = [document.Heading(1, title), *_body(out, plans, others)]
    texts = {
      html: document.to_html(title, blocks),
      markdown: document.to_markdown(blocks),
      data: table.to_csv(records.records(runs_lib.each_once(plans, others))),
    }
    if theirs := list(_numbers(plans)):
      texts[out / "papers.csv"] = table.to_csv(theirs)
    for path, text in texts.items():
      path.write_text(text, encoding="utf-8")
  return list(texts)


def _body(
  out: pathlib.Path,
  plans: Sequence[runs_lib.Plan],
  others: Sequence[runs_lib.Run],
) -> list[document.Block]:
  if not plans and len(others) == 1:
    return card(others[0], out)
  blocks = [*_contents(plans), document.Paragraph(_LEGEND)]
  chapters: dict[str, list[runs_lib.Plan]] = {}
  for plan in plans:
    name = plan.paper.name if plan.paper else _OTHER
    chapters.setdefault(name, []).append(plan)
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
    document.Fold(f"{run.directory.name} (figures: {len(drawn)})", drawn)
    for run in _representatives(plans, others)
    if (drawn := list(figures(run, out).values()))
  ]
  if folds:
    heading = document.Heading(2, "Figures of single runs")
    blocks += [heading, *folds[:MAX_RUNS_WITH_FIGURES]]
  return [*blocks, *_missing(plans)]


def _number(count: int, thing: str) -> str:
  """ "1 seed" or "2 seeds"."""
  return f"{count} {thing}{'s' * (count != 1)}"


def _contents(plans: Sequence[runs_lib.Plan]) -> list[document.Block]:
  """The questions, with verdicts, if stored runs have them."""
  asked = [plan for plan in plans if plan.chosen_for is None]
  if len(asked) < 2:
    return []
  said = any(plan.verdict for plan in asked)
  header = ("question", "verdict") if said else ("question",)
  rows = []
  for plan in asked:
    done = [run for run in plan.runs if run.done]
    seeds = {run.config["run"]["seed"] for run in done}
    of = f"{len(done)} of " * (len(done) < len(plan.runs))
    counts = (
      f"{of}{_number(len(plan.runs), 'run')}, {_number(len(seeds), 'seed')}"
    )
    heading = tables.title(plan)
    verdict = [Cell(plan.verdict or "–")] if said else []
    rows.append([Cell(heading, counts, to=heading), *verdict])
  return [
    document.Heading(2, "Verdicts" if said else "Contents"),
    *([document.Paragraph(_WORDS)] if said else []),
    document.Table([Cell(text) for text in header], rows),
  ]


def _chapter(name: str, plans: Sequence[runs_lib.Plan]) -> list[document.Block]:
  """Heading of a paper's tables, what it is about, and caveats of them all."""
  there = [plan.paper for plan in plans if plan.paper]
  said = dict.fromkeys(paper.about for paper in there)
  caveats = dict.fromkeys(x for paper in there for x in paper.caveats)
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
    [Cell(text) for text in ("paper", "comparison", "sweep")],
    [
      [
        Cell(paper.name),
        Cell(paper.sweeps[name].title, paper.sweeps[name].source),
        Cell(name),
      ]
      for paper, name in absent
    ],
  )
  title = f"Not run here: {len(absent)} comparisons; papers.csv has the papers'"
  return [document.Fold(f"{title} numbers", [found])]


def _place(plan: runs_lib.Plan) -> tuple[str, str, int, str]:
  """Sort key: by paper, in its order; other sweeps come last."""
  paper = plan.paper
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
  here = {(id(plan.paper), plan.name) for plan in plans if plan.paper}
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


# What shows best how a model thinks, of the figures that a run may have.
_PICTURES = (
  "puzzle", "passes", "exit_curve", "loops", "depth"
)  # fmt: skip
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
_ERROR = "/standard_error"
_BY_DEPTH = re.compile(r"depth/(.+)/loop=(\d+)")


def card(run: runs_lib.Run, out: pathlib.Path) -> list[document.Block]:
  """The report of a single run: what it reached, how it looks, what it took.

  Everything else, all scores and the paper's scale, can be expanded below. The
  run may not be complete; `out` is the folder of the document.
  """
  drawn = figures(run, out)
  shown = [
    figure
    for name in (next(filter(drawn.get, _PICTURES), ""), "curves")
    if (figure := drawn.pop(name, None))
  ]
  state = document.Paragraph(f"State: {run.state}.")
  said = [*_headline(run), _cost(run)] if run.done else [state]
  blocks: list[document.Block] = [*said, *shown]
  if command := run.summary.get("command"):
    blocks.append(document.Code(command))
  if drawn:
    title = f"More figures ({len(drawn)})"
    blocks.append(document.Fold(title, list(drawn.values())))
  return [
    *blocks,
    *_depth(run),
    *_scores(run),
    *tables.scale_blocks([run], run.paper),
  ]


def figures(run: runs_lib.Run, out: pathlib.Path) -> dict[str, document.Block]:
  """The figures in a run's directory, by name."""
  return {
    path.stem: document.Image(
      path.read_bytes(),
      pathlib.Path(os.path.relpath(path, out)).as_posix(),
      _CAPTIONS.get(path.stem, path.stem.replace("_", " ").capitalize()),
    )
    for path in sorted((run.directory / "figures").glob("*.png"))
    if path.is_file()
  }


def _headline(run: runs_lib.Run) -> list[document.Block]:
  """The score that matters most in one line, then a line for each split."""
  task, model = (run.config[part]["name"] for part in ("task", "model"))
  names = [
    *(TASKS[task].HEADLINE if task in TASKS else ()),
    *(MODELS[model].headline if model in MODELS else ()),
  ]
  found = run.summary["metrics"]
  took = f"{run.summary['parameters']:,} parameters"
  if seconds := run.summary.get("wall_seconds"):  # Nothing trains an import.
    took += f", {durations.text(seconds)}"
  best = f"test/{names[0]}" if names else ""
  if best not in found:
    return [document.Heading(2, took), *_bullets(found, names)]
  value = score(found[best], found.get(best + _ERROR))
  count = found.get("test/count")
  on = "" if count is None else f" on {count:,.0f} test examples"
  line = f"{names[0].replace('_', ' ')} {value}{on}; {took}"
  return [document.Heading(2, line), *_bullets(found, names)]


def _bullets(
  found: Mapping[str, float], names: Sequence[str]
) -> list[document.Block]:
  lines = ending.scores(found, names)
  return [document.Bullets(lines)] if lines else []


def _cost(run: runs_lib.Run) -> document.Block:
  """What the run took, in a sentence."""
  summary, config = run.summary, run.config
  on = f" on {summary['devices']}" if "devices" in summary else ""
  return document.Paragraph(
    f"Family {config['model']['name']}, task {config['task']['name']}:"
    f" {summary['steps']:,} steps of {config['run']['batch_size']:,} examples"
    f"{on}. Versions, revision and sizes: below."
  )


def _depth(run: runs_lib.Run) -> list[document.Block]:
  """Scores and states after 1, 2, 4, ... loops, and after the trained number.

  Scalars that say how a loop maps its state are in the table of all scores.
  """
  found = run.summary.get("metrics", {})
  places = [match for name in found if (match := _BY_DEPTH.fullmatch(name))]
  names = [*dict.fromkeys(m[1] for m in places if not m[1].endswith(_ERROR))]
  trained = run.config.get("model", {}).get("num_loops")
  loops = sorted({int(match[2]) + 1 for match in places})
  shown = [k for k in loops if k & (k - 1) == 0 or k in (trained, loops[-1])]
  rows = []
  for k in shown:
    cells = [Cell(f"{k} (trained)" if k == trained else str(k))]
    for name in names:
      value = found.get(f"depth/{name}/loop={k - 1}")
      error = found.get(f"depth/{name}{_ERROR}/loop={k - 1}")
      cells.append(Cell("" if value is None else score(value, error)))
    rows.append(cells)
  if not rows:
    return []
  header = [Cell("loops"), *(Cell(name.replace("_", " ")) for name in names)]
  title = f"By number of loops ({len(rows)})"
  return [document.Fold(title, [document.Table(header, rows)])]


def _scores(run: runs_lib.Run) -> list[document.Block]:
  """All scores: of a split's examples together, then by group."""
  found = run.summary.get("metrics", {})
  rows = {
    name: [Cell(name), Cell(score(value, found.get(name + _ERROR)))]
    for name, value in found.items()
    if not name.startswith("train/")
    and not name.endswith(_ERROR)
    and not _BY_DEPTH.fullmatch(name)
  }
  header = [Cell("score"), Cell("mean ± standard error")]
  parts = {
    "All scores": [row for name, row in rows.items() if "=" not in name],
    "Scores by group": [row for name, row in rows.items() if "=" in name],
  }
  return [
    document.Fold(f"{title} ({len(of)})", [document.Table(header, of)])
    for title, of in parts.items()
    if of
  ]
