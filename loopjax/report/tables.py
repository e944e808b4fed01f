"""Tables of one sweep, ours beside the paper's, and of runs of none."""

import collections
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from loopjax.commands import document
from loopjax.commands.document import Cell
from loopjax.report import grouping, papers, plots
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report.words import distinct, duration, number, pairs


def sweep_blocks(
  plan: runs_lib.Plan, pictures: pathlib.Path
) -> list[document.Block]:
  """A sweep: our numbers next to the paper's, scale, plot and commands.

  Args:
    plan: the sweep and its runs.
    pictures: directory for the plot, beside the document.
  """
  paper = papers.of(plan.task, plan.model)
  sweep = sweep_of(plan, paper)
  groups = grouping.group_by_seed(plan.runs)
  # Two directories may have a sweep of one name.
  directory = plan.directory.resolve().name
  blocks: list[document.Block] = [
    document.Heading(2, plan.title or sweep.title),
    document.Paragraph(
      f"Runs: {directory}, sweep {plan.name}. {_source(sweep, paper)}"
    ),
    _comparison(sweep, groups, paper),
  ]
  if same := _same_everywhere(groups):
    blocks.insert(2, document.Paragraph(f"In every run: {same}."))
  picture_name = f"{directory}-{plan.name}"
  key = plots.numeric_key(groups)
  if key and (picture := plots.draw_curve(groups, sweep, key)):
    text = "Ours and the paper's. Bars: sample standard deviation over seeds."
    blocks.append(_image(picture, pictures / f"{picture_name}.png", text))
  if picture := plots.draw_panels(groups, sweep):
    text = "Ours, a line for every seed."
    blocks.append(_image(picture, pictures / f"{picture_name}_runs.png", text))
  if sweep.caveats:
    blocks.append(document.Bullets(sweep.caveats))
  blocks += scale_blocks(plan.runs, paper)
  blocks += [document.Code(plan.command)] if plan.command else []
  return [*blocks, commands_block(plan.runs)]


def runs_block(runs: Sequence[runs_lib.Run]) -> document.Table:
  """Runs that belong to no sweep, one row each."""
  rows = []
  for run in runs:
    paper = paper_of(run)
    columns = paper.columns if paper else _DEFAULT_COLUMNS
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
    return [document.Paragraph("None of these runs is there yet.")]
  facts = [
    (fact.label, _values(fact.value, there), fact.paper)
    for fact in (paper.scale if paper else ())
  ]
  headline = ", ".join(
    f"{label} {value} (paper {theirs})"
    for label, value, theirs in facts[: paper_lib.HEADLINE]
  )
  facts += [
    (label, _values(value, there), "")
    for label, value in (
      ("versions", lambda _, s: pairs(s["versions"])),
      ("revision", lambda _, s: s["revision"] or "not in a checkout"),
    )
  ]
  header = [Cell("scale"), Cell("", kind="ours"), Cell("", kind="paper")]
  rows = [
    [Cell(label), Cell(value, kind="ours"), Cell(theirs, kind="paper")]
    for label, value, theirs in facts
  ]
  title = f"Scale: {headline or 'ours'}"
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
    "exact", "exact match, %", paper_lib.metric("test/exact_match", 100.0)
  ),
  paper_lib.Column("loss", "loss, nats", paper_lib.metric("test/loss"), 3),
)


def paper_of(run: runs_lib.Run) -> paper_lib.Paper | None:
  """The paper of a run's task and family, or None."""
  names = (run.config.get(part, {}).get("name") for part in ("task", "model"))
  return papers.of(*names)


def _image(picture: bytes, path: pathlib.Path, text: str) -> document.Image:
  """Writes a picture; returns its block."""
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(picture)
  return document.Image(picture, f"{path.parent.name}/{path.name}", text)


def sweep_of(
  plan: runs_lib.Plan, paper: paper_lib.Paper | None
) -> paper_lib.Sweep:
  """The paper's record of a sweep, or a plain table for an unknown sweep.

  Where there are no numbers of a paper, rows are for choosing among: they begin
  with the first score of the validation split, by which one may.
  """
  if paper and plan.name in paper.sweeps:
    sweep = paper.sweeps[plan.name]
  else:
    columns = paper.columns if paper else _DEFAULT_COLUMNS
    sweep = paper_lib.Sweep(plan.name, "ours", columns)
  if sweep.rows:
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
      return [column._replace(key="chosen_by", label=label, value=found)]
  return []


def _source(sweep: paper_lib.Sweep, paper: paper_lib.Paper | None) -> str:
  if not sweep.rows or paper is None:
    return f"Source: {sweep.source}; there are no numbers of a paper."
  return f"Source: {sweep.source}. Paper: {paper.name}."


def _comparison(
  sweep: paper_lib.Sweep,
  groups: Sequence[grouping.Group],
  paper: paper_lib.Paper | None,
) -> document.Table:
  """The table of our numbers and the paper's."""
  header = [Cell("setting")]
  if sweep.rows:
    header.append(Cell("with the paper"))
  for column in sweep.columns:
    header.append(Cell(column.label, kind="ours"))
    if sweep.rows:
      header.append(Cell(column.label, kind="paper"))
  labels = ("runs", "evaluated", "steps", "parameters", "wall time")
  header += [Cell(label, kind="ours") for label in labels]
  keys = grouping.distinguishing(groups)
  rows = []
  for group in groups:
    row = grouping.row_of(group.settings, sweep.rows)
    changed = {k: v for k, v in group.overrides.items() if k in keys}
    cells = [
      Cell(
        grouping.as_text(changed) or "as the config is",
        row.label if row else "",
      )
    ]
    if sweep.rows:
      assert paper is not None  # Whose rows they are.
      cells.append(Cell(grouping.verdict(group, sweep, paper) or "–"))
    for column in sweep.columns:
      cells.append(_ours_cell(group, column))
      if sweep.rows:
        cells.append(_paper_cell(row, column))
    rows.append([*cells, *_facts(group)])
  return document.Table(header, rows)


def _ours_cell(group: grouping.Group, column: paper_lib.Column) -> Cell:
  found = grouping.ours(group, column)
  if found is None:
    states = {run.state for run in group.runs}
    nothing_run = states == {"not run"}
    return Cell("not run" if nothing_run else "–", kind="ours")
  error = found.standard_error
  text = f"se\u00a0{error:.2g}" if error is not None else ""
  return _spread_cell(found, column.digits, text, "ours")


def _paper_cell(row: paper_lib.Row | None, column: paper_lib.Column) -> Cell:
  found = row.values.get(column.key) if row else None
  if found is None:
    return Cell("–", kind="paper")
  return _spread_cell(found, column.digits, found.text, "paper")


def _spread_cell(
  found: grouping.Spread | paper_lib.Number, digits: int, text: str, kind: str
) -> Cell:
  """Mean and standard deviation; in small print, the text and all seeds."""
  main = "–" if found.mean is None else number(found.mean, digits)
  if found.std == 0 and kind == "ours":
    return Cell(main, "every seed", kind)
  if found.std is not None:
    main += f"\u00a0±\u00a0{number(found.std, digits)}"
  lonely = len(found.seeds) == 1 and found.mean is not None and kind == "ours"
  seeds = "\u00a0· ".join(
    f"s{seed}:\u00a0{number(value, digits)}"
    for seed, value in found.seeds.items()
  )
  notes = [text, "" if lonely else seeds]
  return Cell(main, "; ".join(filter(None, notes)), kind)


def _facts(group: grouping.Group) -> list[Cell]:
  """Seeds, examples, steps, parameters and time of a group's runs."""
  done = [run.summary for run in group.runs if run.done]
  states = collections.Counter(run.state for run in group.runs if not run.done)
  missing = "; ".join(f"{n} {state}" for state, n in states.items())
  counts = [s.get("metrics", {}).get("test/count") for s in done]
  walls = [s["wall_seconds"] for s in done if "wall_seconds" in s]
  mean_wall = duration(statistics.fmean(walls)) if walls else "–"
  return [
    Cell(f"{len(done)}\u00a0of\u00a0{len(group.runs)}", missing, "ours"),
    Cell(distinct(counts), kind="ours"),
    Cell(distinct(s.get("steps") for s in done), kind="ours"),
    Cell(distinct(s.get("parameters") for s in done), kind="ours"),
    Cell(mean_wall, kind="ours"),
  ]


def _same_everywhere(groups: Sequence[grouping.Group]) -> str:
  keys = grouping.varying(groups)
  first = groups[0].overrides if groups else {}
  return grouping.as_text({k: v for k, v in first.items() if k not in keys})


def _values(value, runs: Iterable[runs_lib.Run]) -> str:
  """The distinct values of one fact over runs; "–" if it is unknown."""
  found = []
  for run in runs:
    try:
      found.append(value(run.config, run.summary))
    except KeyError:  # Another task, or a run that is not complete.
      continue
  return distinct(found)
