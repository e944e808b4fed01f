"""Tasks by name."""

from collections.abc import Mapping

from loopjax.data.arithmetic import task as arithmetic
from loopjax.data.automaton import task as automaton
from loopjax.data.depo import task as depo
from loopjax.data.gsm import task as gsm
from loopjax.data.knowledge import task as knowledge
from loopjax.data.maze import task as maze
from loopjax.data.multihop import task as multihop
from loopjax.data.sudoku import task as sudoku
from loopjax.data.text import task as text
from loopjax.protocols import Task

TASKS: Mapping[str, Task] = {
  "arithmetic": arithmetic,
  "automaton": automaton,
  "depo": depo,
  "gsm": gsm,
  "knowledge": knowledge,
  "maze": maze,
  "multihop": multihop,
  "sudoku": sudoku,
  "text": text,
}
