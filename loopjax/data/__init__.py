"""Tasks by name."""

import types
from typing import TYPE_CHECKING, Any

from loopjax.errors import UserError
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


def _task(module: types.ModuleType) -> Task:
  names = [name for name in vars(Task) if not name.startswith("_")]
  if missing := [name for name in names if not hasattr(module, name)]:
    raise UserError(
      f"{module.__name__} does not define {', '.join(missing)}; see"
      " loopjax.protocols.Task"
    )
  task: Any = module
  return task


TASKS = Registry(
  "task",
  "loopjax.tasks",
  _task,
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
  },
)
