"""The records of every loop of a causal model.

An evaluation by depth measures all depths in one pass, if the logits after loop
k do not depend on later loops. It stores no array of vocabulary size, only a
few numbers per token or row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopjax import checks
from loopjax.losses import tokens as token_losses
from loopjax.nn import linear
from loopjax.types import Array

# The statistics of a loop, and its requested traces.
Record = tuple[dict[str, Array], dict[str, Array]]
STATE = ("hidden_norm", "relative_change", "token_correlation")
_EPSILON = 1e-6


def reads_out_every_loop(config: Any) -> bool:
  """See `Family.reads_out_every_loop`: true of every config."""
  del config
  return True


def record(
  model: Any,
  names: tuple[str, ...],
  stats: dict[str, Array],
  *,
  before: Array | None = None,
  targets: Array | None = None,
  read_out: Callable[[Array], Array] | None = None,
  **traces: Array,
) -> Record:
  """The record of a loop.

  Args:
    model: the model, which computes "prediction" and "confidence".
    names: the requested traces.
    stats: scalars by name, which are always recorded.
    before: the state before the loop [B, T, D]; needed with targets, and for
      the trace "relative_change", f32 [B], see `state`.
    targets: int [B, T], to record what `measured` does; or None.
    read_out: a state [B, T, D] -> the input of the output layer; the model's if
      None.
    **traces: what can be requested: "hidden", the state after the loop
      [B, T, D], and others.
  """
  after, padding = traces["hidden"], model.spec.num_padding_tokens
  if "relative_change" in names:
    assert before is not None
    traces["relative_change"] = state(before, after)["relative_change"]
  if {"prediction", "confidence"} & {*names} or targets is not None:
    hidden = (read_out or model.readout_input)(after)
    logits = linear.token_logits(hidden, model.readout_table(), padding)
    traces |= linear.prediction_and_confidence(logits)
  recorded = checks.recorded(traces, names)
  if targets is not None:
    assert before is not None
    recorded |= measured(model, before, after, hidden, targets)
  return stats, recorded


def joined(first: Record, last: Record) -> Record:
  """The records of all loops, from those of the first and the last ones."""
  return jax.tree.map(lambda *x: jnp.concatenate(x), first, last)


def measured(
  model: Any, before: Array, after: Array, hidden: Array, targets: Array
) -> dict[str, Array]:
  """The record of a loop for an evaluation by depth.

  Args:
    model: the model, whose output table is used.
    before, after: the state before and after the loop, [B, T, D].
    hidden: the input of the output layer after the loop, [B, T, D].
    targets: int [B, T].

  Returns:
    "loss", cross-entropy of the targets, f32 [B, T], nats; "prediction", i32
    [B, T]; and the statistics of `state`.
  """
  tokens = token_losses.read_out(model, hidden, targets)
  scores = {"loss": tokens.losses, "prediction": tokens.predicted}
  return {**scores, **state(before, after)}


def state(before: Array, after: Array) -> dict[str, Array]:
  """Statistics of the state of each row, f32 [B], means over its tokens.

  "hidden_norm": |h|; "relative_change": |h - h'| / |h|, h' before the loop;
  "token_correlation": the cosine of the states with their mean, which is 1 if
    all tokens have the same state, a collapse (Huginn, arXiv 2502.05171,
    section 4.3).
  """
  before, after = (x.astype(jnp.float32) for x in (before, after))
  change = jnp.linalg.norm(after - before, axis=-1)
  norm = jnp.linalg.norm(after, axis=-1)
  mean = jnp.mean(after, axis=1, keepdims=True)
  dot = jnp.sum(after * mean, axis=-1)
  norms = norm * jnp.linalg.norm(mean, axis=-1)
  values = norm, change / (norm + _EPSILON), dot / (norms + _EPSILON)
  means = (jnp.mean(x, axis=1) for x in values)
  return dict(zip(STATE, means, strict=True))
