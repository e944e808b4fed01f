"""The papers' numbers as data, by task and family."""

from loopjax.report.paper import Paper
from loopjax.report.papers import (
  adaptive,
  disco,
  looped,
  loopformer,
  melt,
  recurrent,
  sleep,
  utm,
)

_OF_TEXT = {  # By model.name.
  "adaptive": adaptive.PAPER,
  "looped": looped.PAPER,
  "loopformer": loopformer.PAPER,
  "melt": melt.PAPER,
  "recurrent": recurrent.PAPER,
}
# By task.name, or task.name/model.name if a task has several papers.
PAPERS: dict[str, Paper] = {
  "arithmetic": disco.LANGUAGE,
  **{f"arithmetic/{name}": paper for name, paper in _OF_TEXT.items()},
  "text": disco.LANGUAGE,
  **{f"text/{name}": paper for name, paper in _OF_TEXT.items()},
  "automaton": sleep.AUTOMATON,
  "depo": sleep.DEPO,
  "gsm": sleep.GSM,
  "knowledge/adaptive": adaptive.PAPER,
  "multihop": disco.PAPER,
  "sudoku": utm.PAPER,
}


def of(task: str, model: str) -> Paper | None:
  """The paper of a task, or of a task and a model family; None if unknown."""
  return PAPERS.get(f"{task}/{model}") or PAPERS.get(task)
