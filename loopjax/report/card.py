"""The report card of a single run: what it reached, how it looks, what it took.

Everything else, all scores and the paper's scale, can be expanded below.
"""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from loopjax.commands import document, ending
from loopjax.commands.document import Cell
from loopjax.data import TASKS
from loopjax.models import MODELS
from loopjax.report import runs as runs_lib
from loopjax.report import tables
from loopjax.report.tables import duration, score

# What shows best how a model thinks, of the figures that a run may have.
_PICTURES = (
  "puzzle", "passes", "exit_curve", "loops", "depth", "positions"
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
  "positions": "Loss by position in the document",
  "puzzle": "A test puzzle after each loop",
  "puzzle_failed": "A test puzzle that the model does not solve",
  "router": "Halting probability by loop, during training and at its end",
  "skipping": "Loss against loops that tokens run, if later ones are skipped",
}
_ERROR = "/standard_error"
_BY_DEPTH = re.compile(r"depth/(.+)/loop=(\d+)")


def blocks(run: runs_lib.Run, out: pathlib.Path) -> list[document.Block]:
  """The card of a run that may not be complete.

  Args:
    run: the run.
    out: folder of the document.
  """
  drawn = figures(run, out)
  shown = [
    figure
    for name in (next(filter(drawn.get, _PICTURES), ""), "curves")
    if (figure := drawn.pop(name, None))
  ]
  said = [*_headline(run), _cost(run)] if run.done else [_state(run)]
  card: list[document.Block] = [*said, *shown]
  if command := run.summary.get("command"):
    card.append(document.Code(command))
  if drawn:
    title = f"More figures ({len(drawn)})"
    card.append(document.Fold(title, list(drawn.values())))
  return [
    *card,
    *_depth(run),
    *_scores(run),
    *tables.scale_blocks([run], tables.paper_of(run)),
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
  }


def _state(run: runs_lib.Run) -> document.Block:
  return document.Paragraph(f"State: {run.state}.")


def _headline(run: runs_lib.Run) -> list[document.Block]:
  """The score that matters most in one line, then a line for each split."""
  for section, known in (("task", TASKS), ("model", MODELS)):
    known.register_recorded(run.config[section])
  task, model = (run.config[part]["name"] for part in ("task", "model"))
  names = [
    *(TASKS[task].HEADLINE if task in TASKS else ()),
    *(MODELS[model].headline if model in MODELS else ()),
  ]
  found = run.summary["metrics"]
  took = f"{run.summary['parameters']:,} parameters"
  if seconds := run.summary.get("wall_seconds"):  # Nothing trains an import.
    took += f", {duration(seconds)}"
  best = f"test/{names[0]}" if names else ""
  if best not in found:
    return [document.Heading(2, took), *_bullets(found, names)]
  value = score(found[best], found.get(best + _ERROR))
  count = f"{found['test/count']:,.0f} test examples"
  name = names[0].replace("_", " ")
  line = f"{name} {value} on {count}; {took}"
  return [document.Heading(2, line), *_bullets(found, names)]


def _bullets(
  found: Mapping[str, float], names: Sequence[str]
) -> list[document.Block]:
  lines = ending.scores(found, names)
  return [document.Bullets(lines)] if lines else []


def _cost(run: runs_lib.Run) -> document.Block:
  """What the run took, in a sentence."""
  summary, config = run.summary, run.config
  return document.Paragraph(
    f"Family {config['model']['name']}, task {config['task']['name']}:"
    f" {summary['steps']:,} steps of {config['run']['batch_size']:,} examples"
    f" on {summary['devices']}. Versions, revision and sizes: below."
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
