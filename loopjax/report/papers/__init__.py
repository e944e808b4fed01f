"""The papers' numbers as data, by task.name."""

from loopjax.report.paper import Paper
from loopjax.report.papers import disco, utm

PAPERS: dict[str, Paper] = {"multihop": disco.PAPER, "sudoku": utm.PAPER}
