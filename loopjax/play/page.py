"""The page as one self-contained HTML file."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loopjax import config as config_lib

Inspection = dict[str, Any]  # Predictions for one prompt.


class Source(NamedTuple):
  """A run to inspect.

  Attributes:
    workdir: its work directory.
    settings: its settings.
    loops: K, how many to run.
    checkpoint: its step; the newest intact one if None.
  """

  workdir: pathlib.Path
  settings: config_lib.Settings
  loops: int
  checkpoint: int | None


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
    again: function from a prompt and the number of a start, from 1 on, to the
      `Inspection` of that noisy start; None if the view shows none.
  """

  view: str
  facts: dict[str, Any]
  inspect: Callable[[str], Inspection]
  random: Callable[[int, str], Inspection]
  again: Callable[[str, int], Inspection] | None = None


def facts(
  source: Source, step: int, levels: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
  """Metadata that the page shows for every run, and what its view adds.

  `levels` are names of the difficulties of random prompts, the hardest last.
  """
  settings = source.settings
  return {
    "run": source.workdir.absolute().name, "step": step, "loops": source.loops,
    "trainedLoops": settings.model.num_loops, "levels": list(levels),
    "family": settings.model_name, **more,
  }  # fmt: skip


_HERE = pathlib.Path(__file__).parent
_VIEW, _DATA = "<!-- VIEW -->", "/* DATA */ null"


def make(
  inspector: Inspector, inspections: Sequence[Inspection], *, served: bool
) -> str:
  """The page with inspections of some prompts.

  `page.html` is common to all views; the inspector's view is inserted into it.

  Args:
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
