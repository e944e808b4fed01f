"""The page as one self-contained HTML file."""

import json
import pathlib
from collections.abc import Sequence

from loopjax.play.inspector import Inspection, Inspector

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
