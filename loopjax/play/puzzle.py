"""Predictions of a trained model for a Sudoku, after every loop."""

import base64
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from loopjax.analysis import halting
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import generator, solver
from loopjax.data.sudoku import task as sudoku_task
from loopjax.errors import UserError
from loopjax.loop import starts
from loopjax.play.page import Inspection, Inspector, Source, facts
from loopjax.saved import trained

TRACES = ("prediction", "confidence")
# Shown where a model has them: when cells stop, and what they attend to.
_MORE = ("weight", "attention")
# Difficulties, and their places among random puzzles in order of difficulty.
LEVELS = {"easy": 0.1, "medium": 0.4, "hard": 0.75, "hardest": 0.97}
_DRAWN = 32
_NOISE = 0.4  # Of a start; chosen on validation puzzles for zoo:sudoku_nine.
# Nodes of a search for solutions: under a second. The page waits for it.
_MAX_NODES = 2**19


def load(source: Source) -> Inspector:
  """The inspector of a run on Sudoku.

  Raises:
    UserError: its model does not show what the page shows.
  """
  settings = source.settings
  if unseen := set(TRACES).difference(settings.family.traces):
    raise UserError(
      f"{source.workdir}: model.name={settings.model_name!r} does not record"
      f" {', '.join(sorted(unseen))} after every loop"
    )
  assert isinstance(settings.task, sudoku_task.Config)  # The caller found so.
  board = settings.task.board
  run = trained.read(source.workdir, source.checkpoint)
  more = tuple(x for x in _MORE if x in settings.family.traces)

  drawn = starts.Starts(
    num=1,
    noise=settings.eval.start_noise or _NOISE,
    answer="confidence",
    seed=settings.run.seed,
    draws_state=bool(
      settings.family.draws_state
      and settings.family.draws_state(settings.model)
    ),
    check=None,
    headline=(),
  )

  @functools.partial(jax.jit, static_argnames="noisy")
  def forward(params, inputs, number, noisy):
    model, begun = nnx.merge(run.graphdef, params), {}
    if noisy:
      keys = starts.keys_of(drawn.seed, inputs, number)
      begun = starts.begin(model, keys, drawn)
    trace = (*TRACES, *more)
    return model(inputs, num_loops=source.loops, trace=trace, **begun)

  def again(puzzle: str, number: int) -> Inspection:
    return _inspect(
      board, lambda x: forward(run.params, x, number, number > 0), puzzle
    )

  def inspect(puzzle: str) -> Inspection:
    return again(puzzle, 0)

  return Inspector(
    view="puzzle",
    facts=facts(
      source,
      run.step,
      tuple(LEVELS),
      memory=len(run.params.get("memory_tokens", ())),
      stops="weight" in more,
      attends="attention" in more,
      boxRows=board.box_rows,
      boxColumns=board.box_cols,
    ),
    inspect=inspect,
    random=lambda seed, level: inspect(random_puzzle(board, seed, level)),
    again=again,
  )


def random_puzzle(board: board_lib.Board, seed: int, level: str) -> str:
  """A puzzle of a difficulty, as `parse` reads it.

  Sorts some random puzzles by the solver's wrong guesses, then by fewer clues,
  and returns the one at the level's position.
  """
  rng = np.random.default_rng(seed)
  puzzles, _ = generator.generate(board, _DRAWN, rng)
  guesses = solver.solve(board, puzzles).guesses
  order = np.lexsort((-np.count_nonzero(puzzles, axis=1), guesses))
  return characters(puzzles[order[int(LEVELS[level] * _DRAWN)]])


def parse(board: board_lib.Board, puzzle: str) -> np.ndarray:
  """The digits of a puzzle, int [cells]; 0 for a blank.

  Raises:
    UserError: it has another number of cells, or other characters.
  """
  cells = "".join(puzzle.split())
  if len(cells) != board.num_cells:
    raise UserError(
      f"the puzzle has {len(cells)} cells; this board has {board.num_cells}"
    )
  digits = "".join(str(digit) for digit in range(board.size + 1))
  if wrong := sorted(set(cells) - {".", *digits}):
    raise UserError(
      f"{wrong[0]!r} is not a cell; use 1-{board.size}, or . for a blank"
    )
  return np.array([0 if c == "." else int(c) for c in cells])


def characters(digits: np.ndarray) -> str:
  """A puzzle as `parse` reads it."""
  return "".join(str(digit) if digit else "." for digit in digits.tolist())


def _inspect(
  board: board_lib.Board, forward: Callable[[np.ndarray], Any], puzzle: str
) -> Inspection:
  """A puzzle in the loops of the model.

  Returns:
    "prompt" and "solution" in characters, "" unless there is exactly one;
    "solutions", how many there are, in words; "guesses", how many wrong ones
    the solver needs; "confidence", by which `eval.answer=confidence` chooses
    among starts: log-probability of the output's digits, summed;
    "digits" [K + 1][cells] and "certain" (probability in percent), of every
    loop and of the output; if the model has it, "halted", the loop at which
    each token stops, memory first, [S], and "attention", of queries to keys,
    mean over heads, in 255ths of the largest one of its query, uint8 [K, S, S]
    in base64.
  """
  given = parse(board, puzzle)
  output = jax.device_get(forward((given[None] + 1).astype(np.int32)))
  trace = {name: value[:, 0] for name, value in output.trace.items()}
  probabilities = jax.nn.softmax(output.logits[0])
  digits = [*trace["prediction"], np.argmax(probabilities, axis=-1)]
  certain = [*trace["confidence"], np.max(probabilities, axis=-1)]
  found: Inspection = {}
  if "weight" in trace:
    found["halted"] = halting.steps_taken(trace["weight"]).tolist()
  if "attention" in trace:
    attention = trace["attention"].mean(axis=1)
    attention = attention / attention.max(axis=-1, keepdims=True)
    raw = np.rint(255 * attention).astype(np.uint8).tobytes()
    found["attention"] = base64.b64encode(raw).decode()
  solved = solver.solve(
    board, given[None].astype(np.uint8), max_nodes=_MAX_NODES
  )
  number = int(solved.num_solutions[0])
  unique = number == 1
  return {
    "prompt": characters(given),
    "solution": characters(solved.solutions[0]) if unique else "",
    "solutions": {
      -1: "an unknown number of solutions (the search took too long)",
      0: "no solution",
      1: "one solution",
    }.get(number, "several solutions"),
    "guesses": int(solved.guesses[0]),
    "confidence": round(float(np.sum(np.log(certain[-1]))), 3),
    "digits": [(row - 1).tolist() for row in digits],
    "certain": [np.rint(100 * row).astype(int).tolist() for row in certain],
    **found,
  }
