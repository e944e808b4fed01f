"""The papers' numbers as data, by task and family."""

from loopjax.report.paper import Paper
from loopjax.report.papers import (
  adaptive,
  disco,
  disco_language,
  looped,
  loopformer,
  melt,
  recurrent,
  sleep,
  utm,
)

# By task.name, or task.name/model.name if a task has several papers.
PAPERS: dict[str, Paper] = {
  "arithmetic": disco_language.PAPER,
  "arithmetic/adaptive": adaptive.PAPER,
  "arithmetic/looped": looped.PAPER,
  "arithmetic/loopformer": loopformer.PAPER,
  "arithmetic/melt": melt.PAPER,
  "arithmetic/recurrent": recurrent.PAPER,
  "automaton": sleep.AUTOMATON,
  "depo": sleep.DEPO,
  "gsm": sleep.GSM,
  "knowledge/adaptive": adaptive.PAPER,
  "multihop": disco.PAPER,
  "sudoku": utm.PAPER,
  "text": disco_language.PAPER,
  "text/adaptive": adaptive.PAPER,
  "text/looped": looped.PAPER,
  "text/loopformer": loopformer.PAPER,
  "text/melt": melt.PAPER,
  "text/recurrent": recurrent.PAPER,
}


def of(task: str, model: str) -> Paper | None:
  """The paper of a task, or of a task and a model family; None if unknown."""
  return PAPERS.get(f"{task}/{model}") or PAPERS.get(task)
