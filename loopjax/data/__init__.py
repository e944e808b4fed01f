"""Tasks by name: each module has `Config`, `spec`, `make_dataset`, `score`."""

from loopjax.data.sudoku import task as sudoku

TASKS = {"sudoku": sudoku}
