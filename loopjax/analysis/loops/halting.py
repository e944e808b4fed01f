"""Numbers of steps before tokens halted."""

import numpy as np

from loopjax.analysis import evaluated as evaluated_lib


def ponder_steps(evaluated: evaluated_lib.EvaluatedModel) -> np.ndarray | None:
  """Steps of every token [B, S]; None if the model never stops early.

  A model of a family without a halting rule stops if it traces "weight".
  """
  settings = evaluated.settings
  rule_of = settings.family.halting_rule
  rule = rule_of(settings.model) if rule_of else ""
  weight = evaluated.output.trace.get("weight")
  if weight is None or rule == "fixed":
    return None
  if rule == "ponder":
    return expected_steps(weight)
  return steps_taken(weight)


def steps_taken(weight: np.ndarray) -> np.ndarray:
  """Steps until a token halted (ACT): its last step with nonzero weight.

  Args:
    weight: w_k, the weight of each step's output, f32 [K, ...].

  Returns:
    int [...], 1 to K; 0 where all weights are zero.
  """
  steps = np.arange(1, len(weight) + 1)
  steps = steps.reshape(-1, *[1] * (weight.ndim - 1))
  return np.max(np.where(weight > 0, steps, 0), axis=0)


def expected_steps(weight: np.ndarray) -> np.ndarray:
  """sum_k k w_k, in steps from 1: for rules that never stop (PonderNet).

  Args:
    weight: w_k, f32 [K, ...].

  Returns:
    f32 [...].
  """
  steps = np.arange(1, len(weight) + 1, dtype=weight.dtype)
  return np.tensordot(steps, weight, axes=(0, 0))


def histogram(
  steps: np.ndarray, num_loops: int, num_memory: int
) -> dict[str, np.ndarray]:
  """Share of tokens that took 1, 2, ..., K steps.

  Args:
    steps: [B, S], memory tokens first; rounded to whole steps.
    num_loops: K.
    num_memory: M.

  Returns:
    "cells" and, if there are memory tokens, "memory": f64 [K], each sums to 1.
  """
  parts = {"cells": steps[:, num_memory:]}
  if num_memory:
    parts["memory"] = steps[:, :num_memory]
  whole = {name: np.rint(part).astype(int) for name, part in parts.items()}
  return {
    name: np.bincount(part.ravel(), minlength=num_loops + 1)[1:] / part.size
    for name, part in whole.items()
  }
