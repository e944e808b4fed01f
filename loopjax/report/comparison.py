"""The table of a sweep: our numbers next to the paper's."""

import collections
import statistics
from collections.abc import Sequence

from loopjax.analysis.plots import series
from loopjax.commands.document import Cell, Table
from loopjax.report import grouping
from loopjax.report import paper as paper_lib
from loopjax.report import settings as settings_lib
from loopjax.report.words import distinct, duration, number

CHOSEN_BY = "chosen_by"  # Key of the column of the score that chooses.
_Columns = list[tuple[Cell, list[Cell]]]  # Headers and what is below them.


def table(
  sweep: paper_lib.Sweep,
  groups: Sequence[grouping.Group],
  paper: paper_lib.Paper | None,
  chosen_for: Sequence[str] | None = None,
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
    name, also = settings_lib.of_group(group, groups)
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
  if found.std == 0 and kind == "ours":
    return Cell(main, "every seed")
  if found.std is not None:
    main += f"\u00a0±\u00a0{number(found.std, digits)}"
  lonely = len(found.seeds) == 1 and found.mean is not None and kind == "ours"
  seeds = "\u00a0· ".join(
    f"s{seed}:\u00a0{number(value, digits)}"
    for seed, value in found.seeds.items()
  )
  notes = [text, "" if lonely else seeds]
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
    mean_wall = duration(statistics.fmean(walls)) if walls else "–"
    facts["wall time"].append(Cell(mean_wall))
  return facts
