"""The report as CSV: a row for each number, ours and the paper's."""

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from loopjax.report import grouping, papers, tables
from loopjax.report import paper as paper_lib
from loopjax.report import runs as runs_lib
from loopjax.report import settings as settings_lib

COLUMNS = (
  "paper", "source", "sweep", "directory", "setting", "row", "quantity",
  "verdict", "ours", "ours_std", "ours_standard_error", "ours_seeds",
  "evaluated", "steps", "parameters", "wall_seconds", "paper_mean", "paper_std",
  "paper_seeds", "paper_says", "command",
)  # fmt: skip


def to_csv(plans: Sequence[runs_lib.Plan]) -> str:
  """All numbers of the sweeps, and the papers' numbers for missing sweeps."""
  text = io.StringIO()
  writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
  writer.writeheader()
  for plan in plans:
    writer.writerows(_of_plan(plan))
  for paper, name in missing(plans):
    sweep = paper.sweeps[name]
    for row in sweep.rows:
      for column in sweep.columns:
        writer.writerow(
          _about(paper, sweep, name)
          | {"row": row.label, "quantity": column.label, "verdict": "not run"}
          | _theirs(row, column)
        )
  return text.getvalue()


def missing(
  plans: Sequence[runs_lib.Plan],
) -> list[tuple[paper_lib.Paper, str]]:
  """(paper, sweep) of all tables and figures for which there is no sweep."""
  there = {
    (id(paper), plan.name)
    for plan in plans
    if (paper := papers.of(plan.task, plan.model))
  }
  known = {id(paper): paper for paper in papers.PAPERS.values()}
  return [
    (paper, name)
    for key, paper in known.items()
    for name in paper.sweeps
    if (key, name) not in there
  ]


def _of_plan(plan: runs_lib.Plan) -> Iterator[dict[str, Any]]:
  """The numbers of a sweep."""
  paper = papers.of(plan.task, plan.model)
  sweep = tables.sweep_of(plan, paper)
  groups = grouping.group_by_seed(plan.runs)
  keys = settings_lib.varying(groups)
  for group in groups:
    row = grouping.row_of(group.settings, sweep.rows)
    changed = {k: v for k, v in group.overrides.items() if k in keys}
    done = [run.summary for run in group.runs if run.done]
    facts: dict[str, Any] = {
      "directory": plan.directory.as_posix(),
      "setting": ", ".join(f"{k}={v}" for k, v in changed.items()),
      "row": row.label if row else "",
      "verdict": grouping.verdict(group, sweep, paper) if paper else "",
      "command": plan.command,
    }
    if done:
      first = done[0]
      walls = [s["wall_seconds"] for s in done if "wall_seconds" in s]
      facts |= {
        "evaluated": first.get("metrics", {}).get("test/count"),
        "steps": first.get("steps"),
        "parameters": first.get("parameters"),
        "wall_seconds": statistics.fmean(walls) if walls else None,
      }
    for column in sweep.columns:
      cells = _about(paper, sweep, plan.name) | facts
      cells["quantity"] = column.label
      if mine := grouping.ours(group, column):
        cells |= {
          "ours": mine.mean,
          "ours_std": mine.std,
          "ours_standard_error": mine.standard_error,
          "ours_seeds": len(mine.seeds),
        }
      yield cells | (_theirs(row, column) if row else {})


def _about(
  paper: paper_lib.Paper | None, sweep: paper_lib.Sweep, name: str
) -> dict[str, Any]:
  return {
    "paper": paper.name if paper else "",
    "source": sweep.source,
    "sweep": name,
  }


def _theirs(row: paper_lib.Row, column: paper_lib.Column) -> dict[str, Any]:
  """The paper's number."""
  number = row.values.get(column.key)
  if number is None:
    return {}
  return {
    "paper_mean": number.mean,
    "paper_std": number.std,
    "paper_seeds": len(number.seeds) or None,
    "paper_says": number.text,
  }
