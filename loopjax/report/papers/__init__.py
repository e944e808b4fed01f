"""The papers' numbers as data, by task.name."""

from loopjax.report.paper import Paper
from loopjax.report.papers import disco, sleep, utm

PAPERS: dict[str, Paper] = {
  "automaton": sleep.AUTOMATON,
  "depo": sleep.DEPO,
  "gsm": sleep.GSM,
  "multihop": disco.PAPER,
  "sudoku": utm.PAPER,
}
