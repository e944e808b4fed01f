"""Batching by depth: the rows of a batch may be in different loops.

A row runs one loop of its token at a time, and begins the next token when it
has left: it waits for no other row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.loop import exits
from loopjax.models import causal, exiting
from loopjax.nn.attention.cache import Cache
from loopjax.protocols import ByDepth
from loopjax.types import Array, Output


class Progress(NamedTuple):
  """How far each row is in the loops of a token; zeros between two tokens.

  Attributes:
    hidden: [B, 1, D], the state after the loops that were run.
    state: their number, and what the gate said.
    seen: the read-outs before, if the exit rule compares them.
    own: what else a family keeps between loops, [B, ...]; None for nothing.
  """

  hidden: Any
  state: exits.ExitState
  seen: exits.Seen
  own: Any = None


def between_tokens(model: Any, batch: int, rule: str) -> Progress:
  """The progress of B rows that have begun no token."""
  first = model.token_embedding(jnp.zeros((batch, 1), jnp.int32))
  nothing = exits.nothing_seen(rule, batch, model.spec.vocab_size)
  state = exits.start(jnp.zeros(batch, bool))
  return jax.tree.map(jnp.zeros_like, Progress(first, state, nothing))


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
    del live  # Of rows that read nothing no place is written.
    return model.transform(call, (hidden, cache), k)

  start = model.embed(tokens, None)
  hidden, cache, loops, progress = run_one(
    model, exit_policy, step, (start, cache), progress, valid[:, 0]
  )
  places = call.metadata.places
  places = jnp.where(loops[:, None] > 0, places, cache.capacity)
  output, cache = exiting.left(
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
    model, exit_policy, step, start, reads: as of `run`; the loop is i32 [B].
    progress: of the rows.

  Returns:
    (the hidden states, `cached`, the number of loops of each row that has left
    and 0 for the others, i32 [B], the progress without `own`).
  """
  first, cached = start
  nothing = exits.nothing_seen(
    exit_policy.rule, len(reads), model.spec.vocab_size
  )
  begun = progress.state.loops > 0
  hidden, state, seen = jax.tree.map(
    functools.partial(by_row, begun),
    (progress.hidden, progress.state, progress.seen),
    (first, exits.start(reads), nothing),
  )
  state = state._replace(live=reads)
  carry = hidden, hidden, cached, state, seen
  _, hidden, cached, state, seen = exiting.one_loop(
    model, exit_policy, exit_policy.rule, step, None, carry, state.loops
  )
  loops = jnp.where(reads & ~state.live, state.loops, 0)
  state = state._replace(loops=jnp.where(state.live, state.loops, 0))
  after = progress._replace(hidden=hidden, state=state, seen=seen)
  # Rows that read nothing may be within a token.
  after = jax.tree.map(functools.partial(by_row, reads), after, progress)
  return hidden, cached, loops, after


def by_row(which: Array, x: Array, other: Array) -> Array:
  """x [B, ...] in the rows `which`, bool [B], and `other` in the others."""
  return jnp.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, other)


BY_DEPTH = ByDepth(between_tokens, advance)
