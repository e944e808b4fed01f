"""The papers' numbers as data, by model.name."""

from loopjax.report.paper import Paper
from loopjax.report.papers import utm

PAPERS: dict[str, Paper] = {"utm": utm.PAPER}
