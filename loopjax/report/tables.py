"""Tables of one sweep, next to the paper's, and of runs outside sweeps."""

import collections
import pathlib
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loopjax.analysis.plots import series
from loopjax.commands import document
from loopjax.commands.document import cell, plain
from loopjax.report import grouping, papers
from loopjax.report import runs as runs_lib
from loopjax.report.records import score
from loopjax.run import durations

CHOSEN_BY = "chosen_by"  # Key of the column of the score that chooses.
_MAX_VALUES = 6  # Values shown of one fact about the scale.
_HEADLINE = 4  # Number of facts about the scale that are always shown.
_DEFAULT_COLUMNS = (
  papers.Column("exact", "exact match, %", "test/exact_match", 100.0),
  papers.Column("loss", "loss, nats", "test/loss", digits=3),
)
_ORIGIN = (  # Of every run, besides what its paper has.
  papers.Scale("versions", "versions"),
  papers.Scale("revision", "revision"),
)


def title_of(plan: runs_lib.Plan) -> str:
  """Heading of a sweep's table."""
  return plan.title or sweep_of(plan).title


def sweep_of(plan: runs_lib.Plan) -> papers.Sweep:
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
    sweep = papers.Sweep(plan.name, "ours", columns, panels=panels)
  if sweep.rows or (plan.chosen_for is None and not plan.command):
    return sweep
  for column in sweep.columns:
    name = re.sub("^test", "validation", column.metric)
    if any(name in run.summary.get("metrics", {}) for run in plan.runs):
      label = f"validation: {column.label}"
      chosen = column._replace(key=CHOSEN_BY, label=label, metric=name)
      return sweep._replace(columns=(chosen, *sweep.columns))
  return sweep


def sweep_parts(plan: runs_lib.Plan, out: pathlib.Path, stem: str) -> list[str]:
  """A sweep: our numbers next to the paper's, scale, plots and commands.

  `stem` is the path of its plots, without a suffix, from `out`.
  """
  from loopjax.report import plots  # Imports matplotlib: not for text.

  sweep, groups = sweep_of(plan), grouping.group_by_seed(plan.runs)
  table, notes = comparison(sweep, groups, plan.paper, plan.chosen_for)
  more = sweep.source.removeprefix("ours").lstrip(";, ")
  sentences = [
    f"With the paper's numbers: {sweep.source}."
    if sweep.rows
    else f"No paper has numbers for it{f' ({more})' if more else ''}.",
    *notes,
  ]
  if same := grouping.same_everywhere(groups):
    sentences.append(f"In every run: {same}.")
  directory = plan.directory.resolve().name
  sentences.append(f"Runs: {directory}, sweep {plan.name}.")

  def image(ending: str, picture: bytes, text: str) -> str:
    path = pathlib.PurePath(f"{stem}{ending}.png")
    (out / path).parent.mkdir(exist_ok=True)
    (out / path).write_bytes(picture)
    return document.image(path, text)

  curve = plots.draw_curve(groups, sweep)
  panels = plots.draw_panels(groups, sweep)
  text = (
    "Means and sample standard deviations over seeds, whose number is in the"
    " legend; small marks are seeds."
  )
  return [
    plain(" ".join(sentences)),
    table,
    *([image("", curve, text)] if curve else []),
    *([image("_runs", *panels)] if panels else []),
    *([document.bullets(sweep.caveats)] if sweep.caveats else []),
    sizes(plan.runs, plan.paper),
    *([document.code(plan.command)] if plan.command else []),
    commands(plan.runs),
  ]


def listed(run: runs_lib.Run) -> list[str]:
  """A run that belongs to no sweep as a row."""
  columns = run.paper.columns if run.paper else _DEFAULT_COLUMNS
  group = grouping.Group({}, [run])
  scores = [(column, grouping.ours(group, column)) for column in columns]
  text = "; ".join(
    f"{column.label}: {_number(found.mean, column.digits)}"
    for column, found in scores
    if found
  )
  return list(map(plain, (run.directory.name, text, run.state)))


def sizes(runs: Sequence[runs_lib.Run], paper: papers.Paper | None) -> str:
  """The size of our experiment, next to the paper's."""
  there = [run for run in runs if run.config]
  if not there:
    return "None of these runs exist yet."
  facts = [
    (fact.label, distinct(_of_runs(fact, there)), fact.paper)
    for fact in (*(paper.scale if paper else ()), *_ORIGIN)
  ]
  headline = "; ".join(
    f"{label}: {value} (paper: {theirs})"
    for label, value, theirs in (facts if paper else [])[:_HEADLINE]
  )
  rows = [list(map(plain, fact)) for fact in facts]
  table = document.table(["size", "ours", "paper"], rows)
  return document.fold(f"Sizes. {headline}" if headline else "Sizes", table)


def _of_runs(fact: papers.Scale, runs: Iterable[runs_lib.Run]) -> Iterator[Any]:
  """The values of one fact, of the runs that have it."""
  for run in runs:
    try:
      yield fact.of(run)
    except KeyError:  # Another task, or a run that is not complete.
      continue


def commands(runs: Sequence[runs_lib.Run]) -> str:
  """Every run, its state, and the command that made it."""
  lines = []
  for run in runs:
    command = run.summary.get("command", "")
    lines.append(f"# {run.directory.name}: {run.state}")
    lines += [command] if command else []
  title = f"Runs and their commands ({len(runs)})"
  return document.fold(title, document.code("\n".join(lines)))


def comparison(
  sweep: papers.Sweep,
  groups: Sequence[grouping.Group],
  paper: papers.Paper | None,
  chosen_for: Sequence[str] | None,
) -> tuple[str, list[str]]:
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
    names.append(cell(name, small))
  columns = [("setting", names)]
  notes = []
  if sweep.rows and paper:
    said = [grouping.verdict(group, sweep, paper) for group in groups]
    if {"agrees", "disagrees"} & set(said):
      columns.append(("verdict", [text or "–" for text in said]))
    elif "not run at this scale" in said:
      notes.append("The paper's runs are of another size: no verdict.")
  for column in sweep.columns:
    columns += _scores_of(column, groups, rows, chosen_for)
  same = []
  for label, cells in _facts(groups).items():
    if len(set(cells)) > 1 or "<small>" in cells[0]:
      columns.append((label, cells))
    elif cells[0] != "–":
      same.append(f"{cells[0]} {label}")
  notes += [f"Every row: {', '.join(same)}."] if same else []
  lines = zip(*(cells for _, cells in columns), strict=True)
  return document.table([header for header, _ in columns], list(lines)), notes


def _scores_of(
  column: papers.Column,
  groups: Sequence[grouping.Group],
  rows: Sequence[papers.Row | None],
  chosen_for: Sequence[str] | None,
) -> Iterator[tuple[str, list[str]]]:
  """Our column and the paper's, those of the two that have a number."""
  found = [grouping.ours(group, column) for group in groups]
  theirs = [row.values.get(column.key) if row else None for row in rows]
  chosen = [False] * len(groups)
  if column.key == CHOSEN_BY and chosen_for is not None:
    chosen = _chosen(groups, found, column, chosen_for)
  there = any(run.done for group in groups for run in group.runs)
  if any(found) or not there:
    kind = "ours: " if any(theirs) else ""
    yield (
      kind + plain(column.label),
      [
        _ours_cell(group, mine, column, is_chosen)
        for group, mine, is_chosen in zip(groups, found, chosen, strict=True)
      ],
    )
  if any(theirs):
    cells = [
      _number_cell(x, column.digits, [x.text], x.seeds) if x else "–"
      for x in theirs
    ]
    yield f"paper: {plain(column.label)}", cells


def _chosen(
  groups: Sequence[grouping.Group],
  found: Sequence[grouping.Spread | None],
  column: papers.Column,
  chosen_for: Sequence[str],
) -> list[bool]:
  """Which groups have the best score of those with the same `chosen_for`."""
  best = min if series.lower_is_better(column.metric) else max
  keys = [repr([g.settings.get(x) for x in chosen_for]) for g in groups]
  rivals: dict[str, list[float]] = {key: [] for key in keys}
  for key, mine in zip(keys, found, strict=True):
    rivals[key] += [mine.mean] if mine else []
  return [
    mine is not None and len(rivals[key]) > 1 and mine.mean == best(rivals[key])
    for key, mine in zip(keys, found, strict=True)
  ]


def _ours_cell(
  group: grouping.Group,
  found: grouping.Spread | None,
  column: papers.Column,
  is_chosen: bool,
) -> str:
  if found is None:
    states = {run.state for run in group.runs}
    return "not run" if states == {"not run"} else "–"
  end = ", chosen" if is_chosen else ""
  if found.std == 0 and not found.missing:
    return cell(_number(found.mean, column.digits) + end, "every seed")
  error = found.standard_error
  notes = [f"se\u00a0{error:.2g}" if error is not None else ""]
  seeds = found.seeds if len(found.seeds) > 1 else {}
  without = ", ".join(f"s{seed}" for seed in found.missing)
  last = f"without {without}" if without else ""
  return _number_cell(found, column.digits, notes, seeds, last, end)


def _number_cell(
  found: grouping.Spread | papers.Number,
  digits: int,
  notes: Sequence[str],
  seeds: Mapping[Any, float],
  last: str = "",
  end: str = "",
) -> str:
  """Mean and standard deviation; in small print, notes and seeds."""
  main = "–" if found.mean is None else _number(found.mean, digits)
  if found.std is not None:
    main += f"\u00a0±\u00a0{_number(found.std, digits)}"
  each = "\u00a0· ".join(
    f"s{seed}:\u00a0{_number(value, digits)}" for seed, value in seeds.items()
  )
  return cell(main + end, "; ".join(filter(None, [*notes, each, last])))


def _facts(groups: Sequence[grouping.Group]) -> dict[str, list[str]]:
  """Runs, examples, steps, parameters and time of every group, by label."""
  facts: dict[str, list[str]] = collections.defaultdict(list)
  for group in groups:
    done = [run.summary for run in group.runs if run.done]
    states = collections.Counter(r.state for r in group.runs if not r.done)
    missing = "; ".join(f"{n} {state}" for state, n in states.items())
    counts = [s.get("metrics", {}).get("test/count") for s in done]
    walls = [s["wall_seconds"] for s in done if "wall_seconds" in s]
    planned = f"{len(done)}\u00a0of\u00a0{len(group.runs)}"
    facts["runs"].append(cell(planned, missing))
    facts["test examples"].append(distinct(counts))
    facts["training steps"].append(distinct(s.get("steps") for s in done))
    facts["parameters"].append(distinct(s.get("parameters") for s in done))
    mean = durations.text(statistics.fmean(walls)) if walls else "–"
    facts["wall time"].append(mean.replace(" ", "\u00a0"))
  return facts


def _number(value: float, digits: int) -> str:
  """A number as text, with commas between thousands."""
  return f"{value:,.{digits}f}"


def distinct(values: Iterable[Any]) -> str:
  """Different values, at most _MAX_VALUES of them; None is left out."""
  known = dict.fromkeys(v for v in values if v is not None)
  texts = [score(v) if isinstance(v, int | float) else str(v) for v in known]
  if more := texts[_MAX_VALUES:]:
    texts[_MAX_VALUES:] = [f"and {len(more)} more"]
  return ", ".join(texts) or "–"
