"""The page as one self-contained HTML file."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Inspection = dict[str, Any]  # Predictions for one prompt.


class Inspector(NamedTuple):
  """A trained model and its predictions after every loop.

  Attributes:
    view: name of the page's part for the task, a file of views/.
    facts: metadata of the run for the page; can be written as JSON.
    inspect: function from a prompt to its `Inspection`, the model's predictions
      and the "prompt", which can be written as JSON; raises UserError for an
      invalid prompt.
    random: function from a seed and one of the facts' "levels", "" if there are
      none, to the `Inspection` of a random prompt.
  """

  view: str
  facts: dict[str, Any]
  inspect: Callable[[str], Inspection]
  random: Callable[[int, str], Inspection]


def facts(
  run: str,
  step: int,
  loops: int,
  trained_loops: int,
  levels: Sequence[str] = (),
) -> dict[str, Any]:
  """Metadata that the page shows for every run.

  Args:
    run: its name.
    step: of the checkpoint.
    loops: loops that are run.
    trained_loops: loops that it was trained with.
    levels: names of the difficulties of random prompts, the hardest one last.
  """
  return {
    "run": run, "step": step, "loops": loops, "trainedLoops": trained_loops,
    "levels": list(levels),
  }  # fmt: skip


_HERE = pathlib.Path(__file__).parent
_VIEW, _DATA = "<!-- VIEW -->", "/* DATA */ null"


def make(
  inspector: Inspector, inspections: Sequence[Inspection], *, served: bool
) -> str:
  """The page with inspections of some prompts.

  `page.html` is common to all views; the inspector's view is inserted into it.

  Args:
    inspector: the inspector that made them.
    inspections: at least one, unless the server is asked for them.
    served: whether a server answers requests for other prompts.
  """
  data = {
    "facts": inspector.facts,
    "thoughts": list(inspections),
    "served": served,
  }
  # "<" could end the script.
  text = json.dumps(data).replace("<", "\\u003c")
  page = (_HERE / "page.html").read_text(encoding="utf-8")
  view = _HERE / "views" / f"{inspector.view}.html"
  page = page.replace(_VIEW, view.read_text(encoding="utf-8"))
  before, after = page.split(_DATA)
  return before + text + after
