"""Batching by depth: the rows of a batch may be in different loops.

Each call runs one loop of every row. A row whose token exits begins its next
token in the next call, without waiting for other rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.loop import driver, exits
from loopjax.models import causal, exiting
from loopjax.nn.attention.cache import Cache
from loopjax.protocols import ByDepth
from loopjax.types import Array, Output


class Progress(NamedTuple):
  """The progress of each row's token; zeros between two tokens.

  Attributes:
    hidden: the state after the loops so far, [B, 1, D].
    state: the number of loops so far, and the gate's log-probability.
    history: earlier read-outs, if the exit rule compares them.
    extra: a family's other state between loops, [B, ...]; None for none.
  """

  hidden: Any
  state: exits.ExitState
  history: exits.ReadOutHistory
  extra: Any = None


def between_tokens(model: Any, batch: int, rule: str) -> Progress:
  """The progress of B rows between two tokens."""
  first = model.token_embedding(jnp.zeros((batch, 1), jnp.int32))
  history = exits.no_read_outs(rule, batch, model.spec.vocab_size)
  state = exits.start(jnp.zeros(batch, bool))
  return jax.tree.map(jnp.zeros_like, Progress(first, state, history))


def advance(
  model: Any,
  tokens: Array,
  cache: Cache,
  progress: Progress,
  *,
  num_loops: int,
  valid: Array,
  exit_policy: exits.ExitPolicy,
) -> tuple[Output, Cache, Progress]:
  """See `ByDepth.advance`: each row reads and writes the slots of its loop."""
  call = causal.begin(
    model, tokens, num_loops, "scan", cache=cache, valid=valid
  )

  def step(hidden: Array, cache: Any, k: Array, live: Array) -> Any:
    del live  # Rows that read nothing have no places to write to.
    return model.transform(call, (hidden, cache), k)

  start = model.embed(tokens, None)
  hidden, cache, loops, progress = run_one(
    model, exit_policy, step, (start, cache), progress, valid[:, 0]
  )
  places = call.metadata.places
  places = jnp.where(loops[:, None] > 0, places, cache.capacity)
  output, cache = exiting.finish(
    model,
    exit_policy,
    exit_policy.rule,
    num_loops,
    hidden,
    loops,
    cache,
    call.metadata._replace(places=places),
  )
  return output, cache, progress


def run_one(
  model: Any,
  exit_policy: exits.ExitPolicy,
  step: Callable[[Array, Any, Array, Array], tuple[Array, Any]],
  start: tuple[Array, Any],
  progress: Progress,
  reads: Array,
) -> tuple[Array, Any, Array, Progress]:
  """Runs the next loop of every row, its first if it is between two tokens.

  Args:
    model, exit_policy, step, start, reads: as in `exiting.run`; the loop's
      index is i32 [B].
    progress: the rows' progress.

  Returns:
    (hidden states [B, 1, D]; `cached`; the number of loops of each row that has
    exited, 0 for the others, i32 [B]; the progress, with `extra` unchanged).
  """
  first, cached = start
  history = exits.no_read_outs(
    exit_policy.rule, len(reads), model.spec.vocab_size
  )
  in_progress = progress.state.loops > 0
  hidden, state, history = driver.tree_where(
    in_progress,
    (progress.hidden, progress.state, progress.history),
    (first, exits.start(reads), history),
  )
  state = state._replace(live=reads)
  carry = hidden, hidden, cached, state, history
  _, hidden, cached, state, history = exiting.one_loop(
    model, exit_policy, exit_policy.rule, step, None, carry, state.loops
  )
  loops = jnp.where(reads & ~state.live, state.loops, 0)
  state = state._replace(loops=jnp.where(state.live, state.loops, 0))
  after = progress._replace(hidden=hidden, state=state, history=history)
  # Rows that read nothing may be within a token.
  return hidden, cached, loops, driver.tree_where(reads, after, progress)


BY_DEPTH = ByDepth(between_tokens, advance)
