"""The model card of a model of the package, from what its run wrote."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.commands import document
from loopjax.commands.document import (
  Bullets,
  Cell,
  Code,
  Heading,
  Paragraph,
  Table,
)

_ERROR = "/standard_error"
# What can be done with a model, by its task; all have scores.
COMMANDS: Mapping[str, tuple[str, ...]] = {
  "sudoku": ("play",),
  "text": ("play", "generate"),
  "multihop": ("play",),
}
_FLAGS = {"generate": " --prompt=TEXT"}


def card(
  name: str,
  about: str,
  task: str,
  headline: Sequence[str],
  summary: Mapping[str, Any],
) -> str:
  """The text of the card.

  Args:
    name: its name in `zoo:NAME`.
    about: what it does, in a sentence or two.
    task: name of its task.
    headline: names of the scores that matter, of the task and the family.
    summary: the entry's summary.json.
  """
  metrics = summary["metrics"]
  names = {*headline, "loss"}
  scores = [x for x in metrics if x.rpartition("/")[2] in names]
  scores.sort(key=lambda score: not score.startswith("test"))
  commands = "\n".join(
    f"loopjax {command} zoo:{name}{_FLAGS.get(command, '')}"
    for command in COMMANDS.get(task, ())
  )
  rows = [
    [
      Cell(score),
      Cell(f"{value:.4g}"),
      Cell(f"{metrics[score + _ERROR]:.2g}"),
    ]
    for score in scores
    for value in [metrics[score]]
    if score + _ERROR in metrics
  ]
  versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
  blocks: list[document.Block] = [
    Heading(1, f"zoo:{name}"),
    Paragraph(about),
    Code(commands or f"loopjax zoo score {name}"),
    Bullets(
      [
        f"parameters: {summary['parameters']:,}, stored as {summary['dtype']}",
        f"trained: {summary['steps']:,} steps, {summary['devices']},"
        f" {summary['wall_seconds'] / 60:.0f} minutes",
        f"revision: {summary['revision']}; {versions}",
        f"run digest: {summary['digest']}",
        "licence: Apache-2.0",
      ]
    ),
    Heading(2, "Training"),
    Code(summary["command"]),
    Heading(2, "Scores"),
    Paragraph(
      "Measured at the end of training, before the parameters were cast, with"
      " standard errors over examples; summary.json has all scores."
    ),
    Table([Cell("score"), Cell("mean"), Cell("error")], rows),
  ]
  return document.to_markdown(blocks)


def portable(command: str) -> str:
  """A command without the places of files of one machine."""
  return re.sub(r"(?:(?<=[=,'\"])|^)/[^\s,'\"]*/", "", command)
