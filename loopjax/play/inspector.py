"""The interface between a trained model and the page, for every task."""

from collections.abc import Callable
from typing import Any, NamedTuple

Inspection = dict[str, Any]  # Predictions for one prompt.


class Inspector(NamedTuple):
  """A trained model whose predictions after every loop can be shown.

  Attributes:
    view: name of the page's part for the task, a file of views/.
    facts: metadata of the run for the page; can be written as JSON.
    inspect: function from a prompt to its `Inspection`, the model's predictions
      and the "prompt", which can be written as JSON; raises UserError for an
      invalid prompt.
    random: function from a seed to the `Inspection` of a random prompt.
  """

  view: str
  facts: dict[str, Any]
  inspect: Callable[[str], Inspection]
  random: Callable[[int], Inspection]


def facts(
  run: str, step: int, loops: int, trained_loops: int
) -> dict[str, Any]:
  """Metadata that the page shows for every run."""
  return {
    "run": run, "step": step, "loops": loops, "trainedLoops": trained_loops,
  }  # fmt: skip
