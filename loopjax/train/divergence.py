"""Diagnoses a run whose numbers are no longer finite."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

import loopjax
from loopjax.program.step import BadSteps
from loopjax.run.checkpoints import integrity

_PACKAGE = pathlib.Path(loopjax.__file__).parent


def explain(bad: BadSteps, params: Any) -> str:
  """One line about the bad steps that stopped a run."""
  names = integrity.names(params)
  hit = [name for name, was in zip(names, bad.hit, strict=True) if was]
  where = (
    integrity.abbreviate(hit) or "no parameter (only the loss or carried state)"
  )
  return (
    f"{int(bad.streak)} consecutive steps from step {int(bad.first)} had"
    f" non-finite numbers; gradients of {where}; the parameters are from before"
    " that step"
  )


@jax.transfer_guard("allow")
def find_nan(function: Callable[..., Any], *arguments: Any) -> str:
  """Reruns a call operation by operation to find the first non-finite number.

  Args:
    function: the function, not compiled.
    *arguments: arguments for which it produced a non-finite number.

  Returns:
    One line naming the operation and the line of code.
  """
  # NaN first: masks may contain infinities on purpose.
  for watch in (jax.debug_nans, jax.debug_infs):
    try:
      with jax.disable_jit(), watch(True):
        function(*arguments)
    except FloatingPointError as error:
      return str(error).strip().splitlines()[0] + origin(error)
  return (
    "non-finite in the compiled step, but not when run operation by operation"
  )


def origin(error: BaseException, package: pathlib.Path = _PACKAGE) -> str:
  """ " at FILE:LINE" of the innermost frame in the package; "" if none is."""
  found, trace = "", error.__traceback__
  while trace:
    path = trace.tb_frame.f_code.co_filename
    if path != __file__ and pathlib.Path(path).is_relative_to(package):
      found = f" at {path}:{trace.tb_lineno}"
    trace = trace.tb_next
  return found
