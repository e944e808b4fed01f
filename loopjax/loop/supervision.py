"""Deep supervision with state carried between optimizer steps.

A row of the batch works on one example for several optimizer steps. Each step
is one segment of supervision: it continues from the final state of the previous
segment, without a gradient through that state, and has its own loss. A row that
halts takes its example from the same place in the next batch; the other
examples of that batch are not used.

Source: HRM (arXiv 2506.21734), deep supervision and ACT; TRM (2510.04871),
figure 3; the authors' code, which keeps rows in the same way.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.loop import driver
from loopjax.types import Array

# Entries of an example that are kept.
ENTRIES = ("inputs", "targets", "weights")


class SupervisionState(NamedTuple):
  """The example that each of B rows works on, and its progress.

  Attributes:
    state: the model's state after the last segment, arrays [B, ...].
    steps: number of segments since the row took its example, i32 [B].
    halted: whether the row takes a new example in the next step, bool [B].
    example: the example's ENTRIES, [B, T] each.
  """

  state: Any
  steps: Array
  halted: Array
  example: Mapping[str, Array]


def empty(state: Any, num_tokens: int) -> SupervisionState:
  """Initial rows, all of which take an example at the first step.

  Args:
    state: a state with the right shapes; its values are not used.
    num_tokens: T.
  """
  num_rows = len(jax.tree.leaves(state)[0])
  tokens = jnp.zeros((num_rows, num_tokens), jnp.int32)
  entries = (tokens, tokens, tokens.astype(jnp.float32))
  return SupervisionState(
    state,
    jnp.zeros(num_rows, jnp.int32),
    jnp.ones(num_rows, bool),
    dict(zip(ENTRIES, entries, strict=True)),
  )


def refilled(
  rows: SupervisionState, batch: Mapping[str, Array], start: Any
) -> SupervisionState:
  """Rows that have halted take the batch's examples and the initial state.

  Args:
    rows: rows of the previous step.
    batch: has ENTRIES.
    start: initial state, [B, ...] arrays.
  """
  example = {name: batch[name] for name in ENTRIES}
  return SupervisionState(
    driver.tree_where(rows.halted, start, rows.state),
    jnp.where(rows.halted, 0, rows.steps),
    jnp.zeros_like(rows.halted),
    driver.tree_where(rows.halted, example, rows.example),
  )


def halts(
  wants_to_halt: Array,
  steps: Array,
  max_steps: int,
  exploration: float,
  keys: Array,
) -> Array:
  """Which rows stop working on their example.

  A row stops when `wants_to_halt` is true, at the latest after `max_steps`
  segments. With probability `exploration`, it must also have run at least U{2
  .. max_steps} segments, which shows the halting head the effect of further
  segments.

  Args:
    wants_to_halt: bool [B].
    steps: segments run, this one included, i32 [B].
    max_steps: N_sup.
    exploration: probability of exploration, drawn at every step.
    keys: random keys, [B].

  Returns:
    bool [B].
  """

  def draw(key: Array) -> tuple[Array, Array]:
    explore_key, least_key = jax.random.split(key)
    explores = jax.random.uniform(explore_key) < exploration
    return explores, jax.random.randint(least_key, (), 2, max_steps + 1)

  explores, min_steps = jax.vmap(draw)(keys)
  allowed = ~explores | (steps >= min_steps)
  return (steps >= max_steps) | (wants_to_halt & allowed)
