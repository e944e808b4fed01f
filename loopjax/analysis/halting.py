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
  """sum_k k w_k, in steps from 1, f32 [...]; w_k is f32 [K, ...].

  For rules that never stop (PonderNet).
  """
  steps = np.arange(1, len(weight) + 1, dtype=weight.dtype)
  return np.tensordot(steps, weight, axes=(0, 0))


def by_kind(steps: np.ndarray, num_memory: int) -> dict[str, np.ndarray]:
  """Steps [B, S], memory first, of "cells" and, if there are any, "memory"."""
  parts = {"cells": steps[:, num_memory:]}
  if num_memory:
    parts["memory"] = steps[:, :num_memory]
  return parts


def histogram(steps: np.ndarray, num_loops: int) -> np.ndarray:
  """Share of tokens that took 1, 2, ..., K whole steps, f64 [K]."""
  rounded = np.rint(steps).astype(int).ravel()
  return np.bincount(rounded, minlength=num_loops + 1)[1:] / rounded.size
