"""Tables of one sweep, next to the paper's, and of runs outside sweeps."""

import collections
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from loopjax.analysis.plots import series
from loopjax.commands import document
from loopjax.commands.document import Cell, Table
from loopjax.report import grouping
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.run import durations


def sweep_blocks(
  plan: runs_lib.Plan, pictures: pathlib.Path
) -> list[document.Block]:
  """A sweep: our numbers next to the paper's, scale, plot and commands.

  `pictures` is the path of its plots without a suffix, in a directory next to
  the document.
  """
  from loopjax.report import plots  # Imports matplotlib: not for text.

  paper, sweep = plan.paper, sweep_of(plan)
  groups = grouping.group_by_seed(plan.runs)
  table, notes = comparison_table(sweep, groups, paper, plan.chosen_for)
  sentences = [_source(sweep), *notes]
  if same := grouping.same_everywhere(groups):
    sentences.append(f"In every run: {same}.")
  directory = plan.directory.resolve().name
  sentences.append(f"Runs: {directory}, sweep {plan.name}.")
  blocks: list[document.Block] = [
    document.Heading(3, title(plan)),
    document.Paragraph(" ".join(sentences)),
    table,
  ]
  key = plots.numeric_key(groups)
  if key and (picture := plots.draw_curve(groups, sweep, key)):
    text = (
      "Means and sample standard deviations over seeds, whose number is in the"
      " legend; small marks are seeds."
    )
    blocks.append(_image(picture, pictures, "", text))
  if drawn := plots.draw_panels(groups, sweep):
    picture, text = drawn
    blocks.append(_image(picture, pictures, "_runs", text))
  if sweep.caveats:
    blocks.append(document.Bullets(sweep.caveats))
  blocks += scale_blocks(plan.runs, paper)
  blocks += [document.Code(plan.command)] if plan.command else []
  return [*blocks, commands_block(plan.runs)]


def title(plan: runs_lib.Plan) -> str:
  """Heading of a sweep's table."""
  return plan.title or sweep_of(plan).title


def runs_block(runs: Sequence[runs_lib.Run]) -> document.Table:
  """Runs that belong to no sweep, one row each."""
  rows = []
  for run in runs:
    columns = run.paper.columns if run.paper else _DEFAULT_COLUMNS
    group = grouping.Group({}, [run])
    scores = [(column, grouping.ours(group, column)) for column in columns]
    text = "; ".join(
      f"{column.label}: {number(found.mean, column.digits)}"
      for column, found in scores
      if found
    )
    rows.append([Cell(run.directory.name), Cell(text), Cell(run.state)])
  header = [Cell("run"), Cell("result", kind="ours"), Cell("state")]
  return document.Table(header, rows)


def scale_blocks(
  runs: Sequence[runs_lib.Run], paper: paper_lib.Paper | None
) -> list[document.Block]:
  """The size of our experiment, next to the paper's."""
  there = [run for run in runs if run.config]
  if not there:
    return [document.Paragraph("None of these runs exist yet.")]
  facts = [
    (fact.label, _values(fact, there), fact.paper)
    for fact in (*(paper.scale if paper else ()), *_ORIGIN)
  ]
  headline = "; ".join(
    f"{label}: {value} (paper: {theirs})"
    for label, value, theirs in (facts if paper else [])[: paper_lib.HEADLINE]
  )
  header = [Cell("size"), Cell("", kind="ours"), Cell("", kind="paper")]
  rows = [
    [Cell(label), Cell(value, kind="ours"), Cell(theirs, kind="paper")]
    for label, value, theirs in facts
  ]
  title = f"Sizes. {headline}" if headline else "Sizes"
  return [document.Fold(title, [document.Table(header, rows)])]


def commands_block(runs: Sequence[runs_lib.Run]) -> document.Fold:
  """Every run, its state, and the command that made it."""
  lines = []
  for run in runs:
    command = run.summary.get("command", "")
    lines.append(f"# {run.directory.name}: {run.state}")
    lines += [command] if command else []
  title = f"Runs and their commands ({len(runs)})"
  return document.Fold(title, [document.Code("\n".join(lines))])


_DEFAULT_COLUMNS = (
  paper_lib.Column(
    "exact", "exact match, %", paper_lib.Metric("test/exact_match", 100.0)
  ),
  paper_lib.Column("loss", "loss, nats", paper_lib.Metric("test/loss"), 3),
)
_ORIGIN = (  # Of every run, besides what its paper has.
  paper_lib.Scale(
    "versions",
    lambda _, s: " ".join(f"{name} {x}" for name, x in s["versions"].items()),
    "",
  ),
  paper_lib.Scale(
    "revision", lambda _, s: s["revision"] or "not in a checkout", ""
  ),
)


def _image(
  picture: bytes, stem: pathlib.Path, kind: str, text: str
) -> document.Image:
  """Writes a picture; returns its block."""
  path = stem.with_name(f"{stem.name}{kind}.png")
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(picture)
  return document.Image(picture, f"{path.parent.name}/{path.name}", text)


def sweep_of(plan: runs_lib.Plan) -> paper_lib.Sweep:
  """The paper's record of a sweep, or a plain table for an unknown sweep.

  Without a paper's numbers, the rows may be a search: they then start with the
  first validation score, by which a row may be chosen. Stored runs say whether
  they are a search.
  """
  paper = plan.paper
  if paper and plan.name in paper.sweeps:
    sweep = paper.sweeps[plan.name]
  else:
    columns = paper.columns if paper else _DEFAULT_COLUMNS
    panels = paper.panels if paper and plan.chosen_for is None else ()
    sweep = paper_lib.Sweep(plan.name, "ours", columns, panels=panels)
  if sweep.rows or (plan.chosen_for is None and not plan.command):
    return sweep
  return sweep._replace(columns=(*_chosen_by(plan, sweep), *sweep.columns))


def _chosen_by(
  plan: runs_lib.Plan, sweep: paper_lib.Sweep
) -> list[paper_lib.Column]:
  """The validation score that belongs to the first score of a test."""
  for column in sweep.columns:
    value = column.value
    if not isinstance(value, paper_lib.Metric):
      continue
    found = value.of_validation()
    if any(found.name in run.summary.get("metrics", {}) for run in plan.runs):
      label = f"validation: {column.label}"
      key = CHOSEN_BY
      return [column._replace(key=key, label=label, value=found)]
  return []


def _source(sweep: paper_lib.Sweep) -> str:
  """Where the comparison is from, and whether a paper has numbers for it."""
  if sweep.rows:
    return f"With the paper's numbers: {sweep.source}."
  more = sweep.source.removeprefix("ours").lstrip(";, ")
  return f"No paper has numbers for it{f' ({more})' if more else ''}."


def _values(fact: paper_lib.Scale, runs: Iterable[runs_lib.Run]) -> str:
  """The distinct values of one fact over runs; "–" if it is unknown."""
  found = []
  for run in runs:
    try:
      found.append(fact.of(run.config, run.summary))
    except KeyError:  # Another task, or a run that is not complete.
      continue
  return distinct(found)


CHOSEN_BY = "chosen_by"  # Key of the column of the score that chooses.
_Columns = list[tuple[Cell, list[Cell]]]  # Headers and what is below them.


def comparison_table(
  sweep: paper_lib.Sweep,
  groups: Sequence[grouping.Group],
  paper: paper_lib.Paper | None,
  chosen_for: Sequence[str] | None,
) -> tuple[Table, list[str]]:
  """Our numbers and the paper's, a row for every group.

  Args:
    sweep: its columns and the paper's rows; a column without any number is
      omitted.
    groups: the rows, in order.
    paper: the paper of `sweep.rows`.
    chosen_for: settings for each of whose values one row was chosen by the
      column CHOSEN_BY; None if none was.

  Returns:
    (the table, sentences on the settings that all rows share).
  """
  rows = [grouping.row_of(group.settings, sweep.rows) for group in groups]
  names = []
  for group, row in zip(groups, rows, strict=True):
    name, also = grouping.of_group(group, groups)
    small = "; ".join(filter(None, (row.label if row else "", also)))
    names.append(Cell(name, small))
  columns: _Columns = [(Cell("setting"), names)]
  notes = []
  if sweep.rows and paper:
    said = [grouping.verdict(group, sweep, paper) for group in groups]
    if {"agrees", "disagrees"} & set(said):
      cells = [Cell(text or "–") for text in said]
      columns.append((Cell("verdict"), cells))
    elif "not run at this scale" in said:
      notes.append("The paper's runs are of another size: no verdict.")
  for column in sweep.columns:
    chosen = _chosen(groups, column, chosen_for)
    columns += _scores(column, groups, rows, chosen)
  same = []
  for label, cells in _facts(groups).items():
    if len(set(cells)) == 1 and not cells[0].small:
      same += [] if cells[0].text == "–" else [f"{cells[0].text} {label}"]
    else:
      columns.append((Cell(label), cells))
  lines = zip(*(cells for _, cells in columns), strict=True)
  whole = Table([header for header, _ in columns], [list(x) for x in lines])
  return whole, [*notes, *([f"Every row: {', '.join(same)}."] if same else [])]


def _scores(
  column: paper_lib.Column,
  groups: Sequence[grouping.Group],
  rows: Sequence[paper_lib.Row | None],
  chosen: Sequence[bool],
) -> _Columns:
  """Our column and the paper's, those of the two that have a number."""
  found = [grouping.ours(group, column) for group in groups]
  theirs = [row.values.get(column.key) if row else None for row in rows]
  there = any(run.done for group in groups for run in group.runs)
  columns: _Columns = []
  if any(found) or not there:
    cells = [
      _ours_cell(group, mine, column, is_chosen)
      for group, mine, is_chosen in zip(groups, found, chosen, strict=True)
    ]
    kind = "ours" if any(theirs) else ""
    columns.append((Cell(column.label, kind=kind), cells))
  if any(theirs):
    cells = [_paper_cell(number, column) for number in theirs]
    columns.append((Cell(column.label, kind="paper"), cells))
  return columns


def _chosen(
  groups: Sequence[grouping.Group],
  column: paper_lib.Column,
  chosen_for: Sequence[str] | None,
) -> list[bool]:
  """Which groups have the best score of those with the same `chosen_for`."""
  if column.key != CHOSEN_BY or chosen_for is None:
    return [False] * len(groups)
  assert isinstance(column.value, paper_lib.Metric)
  best = min if series.lower_is_better(column.value.name) else max
  found = [grouping.ours(group, column) for group in groups]
  rivals: dict[str, list[float]] = {}
  keys = [repr([g.settings.get(x) for x in chosen_for]) for g in groups]
  for key, mine in zip(keys, found, strict=True):
    rivals.setdefault(key, []).extend([mine.mean] if mine else [])
  return [
    mine is not None and len(rivals[key]) > 1 and mine.mean == best(rivals[key])
    for key, mine in zip(keys, found, strict=True)
  ]


def _ours_cell(
  group: grouping.Group,
  found: grouping.Spread | None,
  column: paper_lib.Column,
  is_chosen: bool,
) -> Cell:
  if found is None:
    states = {run.state for run in group.runs}
    return Cell("not run" if states == {"not run"} else "–")
  error = found.standard_error
  text = f"se\u00a0{error:.2g}" if error is not None else ""
  cell = _spread_cell(found, column.digits, text, "ours")
  return cell._replace(text=f"{cell.text}, chosen") if is_chosen else cell


def _paper_cell(
  found: paper_lib.Number | None, column: paper_lib.Column
) -> Cell:
  if found is None:
    return Cell("–")
  return _spread_cell(found, column.digits, found.text, "paper")


def _spread_cell(
  found: grouping.Spread | paper_lib.Number, digits: int, text: str, kind: str
) -> Cell:
  """Mean and standard deviation; in small print, the text and all seeds."""
  main = "–" if found.mean is None else number(found.mean, digits)
  missing = found.missing if isinstance(found, grouping.Spread) else ()
  without = f"without {', '.join(f's{seed}' for seed in missing)}"
  if found.std == 0 and kind == "ours" and not missing:
    return Cell(main, "every seed")
  if found.std is not None:
    main += f"\u00a0±\u00a0{number(found.std, digits)}"
  lonely = len(found.seeds) == 1 and found.mean is not None and kind == "ours"
  seeds = "\u00a0· ".join(
    f"s{seed}:\u00a0{number(value, digits)}"
    for seed, value in found.seeds.items()
  )
  notes = [text, "" if lonely else seeds, without if missing else ""]
  return Cell(main, "; ".join(filter(None, notes)))


def _facts(groups: Sequence[grouping.Group]) -> dict[str, list[Cell]]:
  """Runs, examples, steps, parameters and time of every group, by label."""
  facts: dict[str, list[Cell]] = collections.defaultdict(list)
  for group in groups:
    done = [run.summary for run in group.runs if run.done]
    states = collections.Counter(r.state for r in group.runs if not r.done)
    missing = "; ".join(f"{n} {state}" for state, n in states.items())
    counts = [s.get("metrics", {}).get("test/count") for s in done]
    walls = [s["wall_seconds"] for s in done if "wall_seconds" in s]
    planned = f"{len(done)}\u00a0of\u00a0{len(group.runs)}"
    facts["runs"].append(Cell(planned, missing))
    facts["test examples"].append(Cell(distinct(counts)))
    facts["training steps"].append(Cell(distinct(s.get("steps") for s in done)))
    facts["parameters"].append(
      Cell(distinct(s.get("parameters") for s in done))
    )
    mean_wall = durations.text(statistics.fmean(walls)) if walls else "–"
    facts["wall time"].append(Cell(mean_wall.replace(" ", "\u00a0")))
  return facts


_MAX_VALUES = 6  # Values shown of one fact about the scale.


def number(value: float, digits: int) -> str:
  """A number as text, with commas between thousands."""
  return f"{value:,.{digits}f}"


def distinct(values: Iterable[Any]) -> str:
  """Different values, at most _MAX_VALUES of them; None is left out."""
  known = dict.fromkeys(v for v in values if v is not None)
  texts = [
    score(v, None) if isinstance(v, (int, float)) else str(v) for v in known
  ]
  more = [f"and {len(texts) - _MAX_VALUES} more"]
  shown = texts[:_MAX_VALUES] + (more if len(texts) > _MAX_VALUES else [])
  return ", ".join(shown) or "–"


def score(value: float, standard_error: float | None) -> str:
  """A score with four digits, and its standard error if it has one."""
  small = abs(value) < 9999.5  # Larger ones would have an exponent.
  text = f"{value:,.4g}" if small else f"{value:,.0f}"
  return f"{text} ± {standard_error:.2g}" if standard_error else text
