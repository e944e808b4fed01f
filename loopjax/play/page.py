"""The page as one HTML file that loads nothing."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from loopjax.play.thoughts import Thought

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
_PLACE = "/* DATA */ null"


def make(
  facts: dict[str, Any], thoughts: Sequence[Thought], *, served: bool
) -> str:
  """The page with some puzzles in it.

  Args:
    facts: of the `Thinker`.
    thoughts: at least one.
    served: whether a server answers, so that others can be asked for.
  """
  data = {"facts": facts, "thoughts": list(thoughts), "served": served}
  # "<" could end the script.
  text = json.dumps(data).replace("<", "\\u003c")
  template = _TEMPLATE.read_text(encoding="utf-8")
  before, after = template.split(_PLACE)
  return before + text + after
