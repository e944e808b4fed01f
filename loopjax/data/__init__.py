"""Tasks by name: each module has `Config`, `spec`, `make_dataset`, `score`."""

from loopjax.data.automaton import task as automaton
from loopjax.data.depo import task as depo
from loopjax.data.gsm import task as gsm
from loopjax.data.multihop import task as multihop
from loopjax.data.sudoku import task as sudoku

TASKS = {
  "automaton": automaton,
  "depo": depo,
  "gsm": gsm,
  "multihop": multihop,
  "sudoku": sudoku,
}
