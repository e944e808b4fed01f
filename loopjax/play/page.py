"""The page as one HTML file that loads nothing."""

import json
import pathlib
from collections.abc import Sequence

from loopjax.play.thinker import Thinker, Thought

_HERE = pathlib.Path(__file__).parent
_VIEW, _DATA = "<!-- VIEW -->", "/* DATA */ null"


def make(thinker: Thinker, thoughts: Sequence[Thought], *, served: bool) -> str:
  """The page with some thoughts in it.

  `page.html` is what all views share; the thinker's view goes into its middle.

  Args:
    thinker: whose thoughts they are.
    thoughts: at least one.
    served: whether a server answers, so that others can be asked for.
  """
  data = {"facts": thinker.facts, "thoughts": list(thoughts), "served": served}
  # "<" could end the script.
  text = json.dumps(data).replace("<", "\\u003c")
  page = (_HERE / "page.html").read_text(encoding="utf-8")
  view = _HERE / "views" / f"{thinker.view}.html"
  page = page.replace(_VIEW, view.read_text(encoding="utf-8"))
  before, after = page.split(_DATA)
  return before + text + after
