"""What the page needs of a trained model, whatever it thinks about."""

from collections.abc import Callable
from typing import Any, NamedTuple

Thought = dict[str, Any]


class Thinker(NamedTuple):
  """A trained model that says what it thinks.

  Attributes:
    view: the page's part that shows its thoughts, a file of views/.
    facts: about the run, for the page; ready for JSON.
    think: (prompt) -> its Thought, ready for JSON, with the "prompt" itself;
      raises UserError for what is none.
    random: (seed) -> a prompt.
  """

  view: str
  facts: dict[str, Any]
  think: Callable[[str], Thought]
  random: Callable[[int], str]


def facts(run: str, step: int, loops: int, trained_loops: int) -> Thought:
  """What the page says of every run."""
  return {
    "run": run, "step": step, "loops": loops, "trainedLoops": trained_loops,
  }  # fmt: skip
