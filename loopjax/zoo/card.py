"""The model card of a model of the package, from what its run wrote."""

import re
from collections.abc import Mapping
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


def card(name: str, about: str, summary: Mapping[str, Any]) -> str:
  """The text of the card.

  Args:
    name: its name in `zoo:NAME`.
    about: what it does, in a sentence or two.
    summary: the entry's summary.json.
  """
  metrics = summary["metrics"]
  rows = [
    [
      Cell(score),
      Cell(f"{value:.4g}"),
      Cell(f"{metrics[score + _ERROR]:.2g}"),
    ]
    for score, value in metrics.items()
    if score + _ERROR in metrics
  ]
  versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
  blocks: list[document.Block] = [
    Heading(1, f"zoo:{name}"),
    Paragraph(about),
    Bullets(
      [
        f"parameters: {summary['parameters']:,}, stored as {summary['dtype']}",
        f"trained: {summary['steps']:,} steps, {summary['devices']},"
        f" {summary['wall_seconds'] / 60:.0f} minutes",
        f"revision: {summary['revision']}; {versions}",
        f"digest of the run: {summary['digest']}",
        "licence: Apache-2.0",
      ]
    ),
    Heading(2, "Training"),
    Code(summary["command"]),
    Heading(2, "Scores"),
    Paragraph(
      "At the end of training, before parameters were cast, each with its"
      " standard error over examples."
    ),
    Table([Cell("score"), Cell("mean"), Cell("error")], rows),
  ]
  return document.to_markdown(blocks)


def portable(command: str) -> str:
  """A command without the places of files of one machine."""
  return re.sub(r"(?:(?<=[=,'\"])|^)/[^\s,'\"]*/", "", command)
