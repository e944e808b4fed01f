"""Tables of one sweep, next to the paper's, and of runs outside sweeps."""

import pathlib
from collections.abc import Iterable, Sequence

from loopjax.commands import document
from loopjax.commands.document import Cell
from loopjax.report import comparison, grouping, papers, plots
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report import settings as settings_lib
from loopjax.report.words import distinct, number, pairs


def sweep_blocks(
  plan: runs_lib.Plan, pictures: pathlib.Path
) -> list[document.Block]:
  """A sweep: our numbers next to the paper's, scale, plot and commands.

  Args:
    plan: the sweep and its runs.
    pictures: path of its plots without a suffix, in a directory next to the
      document.
  """
  paper = papers.of(plan.task, plan.model)
  sweep = sweep_of(plan, paper)
  groups = grouping.group_by_seed(plan.runs)
  table, notes = comparison.table(sweep, groups, paper, plan.chosen_for)
  sentences = [_source(sweep), *notes]
  if same := settings_lib.same_everywhere(groups):
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
  if picture := plots.draw_panels(groups, sweep):
    blocks.append(_image(picture, pictures, "_runs", plots.caption(sweep)))
  if sweep.caveats:
    blocks.append(document.Bullets(sweep.caveats))
  blocks += scale_blocks(plan.runs, paper)
  blocks += [document.Code(plan.command)] if plan.command else []
  return [*blocks, commands_block(plan.runs)]


def title(plan: runs_lib.Plan) -> str:
  """Heading of a sweep's table."""
  paper = papers.of(plan.task, plan.model)
  return plan.title or sweep_of(plan, paper).title


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
    return [document.Paragraph("None of these runs exist yet.")]
  facts = [
    (fact.label, _values(fact.value, there), fact.paper)
    for fact in (paper.scale if paper else ())
  ]
  headline = "; ".join(
    f"{label}: {value} (paper: {theirs})"
    for label, value, theirs in facts[: paper_lib.HEADLINE]
  )
  facts += [
    (label, _values(value, there), "")
    for label, value in (
      ("versions", lambda _, s: pairs(s["versions"])),
      ("revision", lambda _, s: s["revision"] or "not in a checkout"),
    )
  ]
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


def paper_of(run: runs_lib.Run) -> paper_lib.Paper | None:
  """The paper of a run's task and family, or None."""
  names = (run.config.get(part, {}).get("name") for part in ("task", "model"))
  return papers.of(*names)


def _image(
  picture: bytes, stem: pathlib.Path, kind: str, text: str
) -> document.Image:
  """Writes a picture; returns its block."""
  path = stem.with_name(f"{stem.name}{kind}.png")
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(picture)
  return document.Image(picture, f"{path.parent.name}/{path.name}", text)


def sweep_of(
  plan: runs_lib.Plan, paper: paper_lib.Paper | None
) -> paper_lib.Sweep:
  """The paper's record of a sweep, or a plain table for an unknown sweep.

  Without a paper's numbers, the rows may be a search: they then start with the
  first validation score, by which a row may be chosen. Stored runs say whether
  they are a search.
  """
  if paper and plan.name in paper.sweeps:
    sweep = paper.sweeps[plan.name]
  else:
    columns = paper.columns if paper else _DEFAULT_COLUMNS
    sweep = paper_lib.Sweep(plan.name, "ours", columns)
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
      key = comparison.CHOSEN_BY
      return [column._replace(key=key, label=label, value=found)]
  return []


def _source(sweep: paper_lib.Sweep) -> str:
  """Where the comparison is from, and whether a paper has numbers for it."""
  if sweep.rows:
    return f"With the paper's numbers: {sweep.source}."
  more = sweep.source.removeprefix("ours").lstrip(";, ")
  return f"No paper has numbers for it{f' ({more})' if more else ''}."


def _values(value, runs: Iterable[runs_lib.Run]) -> str:
  """The distinct values of one fact over runs; "–" if it is unknown."""
  found = []
  for run in runs:
    try:
      found.append(value(run.config, run.summary))
    except KeyError:  # Another task, or a run that is not complete.
      continue
  return distinct(found)
