"""Tasks by name."""

from typing import TYPE_CHECKING

from loopjax.protocols import Registry, Task

if TYPE_CHECKING:  # Checks each task against the protocol.
  from loopjax.data.arithmetic import task as arithmetic
  from loopjax.data.automaton import task as automaton
  from loopjax.data.depo import task as depo
  from loopjax.data.gsm import task as gsm
  from loopjax.data.knowledge import task as knowledge
  from loopjax.data.maze import task as maze
  from loopjax.data.multihop import task as multihop
  from loopjax.data.sudoku import task as sudoku
  from loopjax.data.text import task as text

  _COMPARED: tuple[Task, ...] = (
    arithmetic,
    automaton,
    depo,
    gsm,
    knowledge,
    maze,
    multihop,
    sudoku,
    text,
  )

TASKS = Registry[Task](
  {
    "arithmetic": "loopjax.data.arithmetic.task",
    "automaton": "loopjax.data.automaton.task",
    "depo": "loopjax.data.depo.task",
    "gsm": "loopjax.data.gsm.task",
    "knowledge": "loopjax.data.knowledge.task",
    "maze": "loopjax.data.maze.task",
    "multihop": "loopjax.data.multihop.task",
    "sudoku": "loopjax.data.sudoku.task",
    "text": "loopjax.data.text.task",
  }
)
