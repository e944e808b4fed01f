"""Training calls, of one run or of several runs in one compiled program.

A run is a generator: it yields the arguments of a training call and is sent
the results, until it returns its summary. Whoever drives it makes the calls.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax

from loopjax import program as program_lib
from loopjax.program import step
from loopjax.types import Batch, Metrics

T = TypeVar("T")
# (state, stacked batches, the teacher's parameters); the state is consumed.
Arguments = tuple[step.TrainState, Batch, Any]
Results = tuple[step.TrainState, Metrics]
Run = Generator[Arguments, Results, T]


def without_transfers(part: Callable[..., Run[T]]) -> Callable[..., Run[T]]:
  """A part of a run that may not transfer anything implicitly."""

  @functools.wraps(part)
  def guarded(*args: Any, **kwargs: Any) -> Run[T]:
    results: Any = None
    with contextlib.closing(part(*args, **kwargs)) as steps:
      while True:
        with jax.transfer_guard("disallow"):
          try:
            arguments = steps.send(results)
          except StopIteration as end:
            return end.value
        results = yield arguments

  return guarded


class Calls:
  """Makes the training calls of runs that differ only in their seeds.

  Each round is one call of a program that trains all unfinished runs. The
  program is compiled again when a run ends before the others.
  """

  def __init__(self, runs: int = 1):
    """Takes the number of runs that will be driven."""
    self._runs = runs
    self._compiled: dict[int, Any] = {}
    self._program: program_lib.Program | None = None

  def compile(self, program: program_lib.Program, arguments: Arguments) -> Any:
    """The compiled program of all runs; `arguments` are of one of them."""
    self._program = self._program or program
    return self._for([arguments] * self._runs)

  def drive(self, runs: Sequence[Run[T]]) -> list[T]:
    """Runs them all, in step with each other; returns their results."""
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    with contextlib.ExitStack() as stack:
      for run in runs:
        stack.enter_context(contextlib.closing(run))
      while answers:
        arguments = {}
        for number, answer in answers.items():
          try:
            arguments[number] = runs[number].send(answer)
          except StopIteration as end:
            results[number] = end.value
        results_of_call = (
          self._make(list(arguments.values())) if arguments else []
        )
        answers = dict(zip(arguments, results_of_call, strict=True))
    return [results[number] for number in range(len(runs))]

  def _make(self, calls: list[Arguments]) -> Sequence[Results]:
    compiled = self._for(calls)
    with jax.transfer_guard("disallow"):  # Transfers would stall every step.
      if len(calls) == 1:
        return [compiled(*calls[0])]
      several = compiled(*map(list, zip(*calls, strict=True)))
    return list(zip(*several, strict=True))

  def _for(self, calls: list[Arguments]) -> Any:
    """The compiled program for this number of runs."""
    num_runs, program = len(calls), self._program
    assert program
    if num_runs not in self._compiled:
      if num_runs == 1:
        lowered = program.train.lower(*calls[0])
      else:
        several = map(list, zip(*calls, strict=True))
        from loopjax.program import together  # Only runs of several seeds.

        lowered = together.together(program).lower(*several)
      self._compiled[num_runs] = lowered.compile()
    return self._compiled[num_runs]
