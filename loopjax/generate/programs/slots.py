"""The state of generation on the device: a cache and a batch of slots.

Shapes are static. Every slot holds one sequence or none; an empty slot takes
part in every step without effect.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.generate import sampling
from loopjax.generate.programs.cached_model import CachedModel
from loopjax.loop import driver
from loopjax.types import Array

MAX_STOPS = 8  # Stop tokens of a request.
MAX_TOP = 20  # Most likely tokens that are reported with a generated token.
# Why a sequence ends with a token.
UNFINISHED, STOP, LENGTH = range(3)
# How many loops rows run: "unrolled": all; every loop is compiled by itself.
# "loops": as many as each may. "exits": the exit rule is computed as well. All
# wait for the last.
DEPTHS = "unrolled", "loops", "exits"
UNROLLED, LOOPS, EXITS = DEPTHS


class Slots(NamedTuple):
  """The sequences in B slots, without their cache.

  Attributes:
    token: i32 [B], the last generated token, which the model has not processed
      yet.
    position: i32 [B], in its sequence, of the next token to generate.
    num_left: i32 [B], maximum number of tokens still to generate; 0 for an
      empty slot.
    seen: bool [B, V], the tokens that occur in the sequence, prompt included.
    stops: i32 [B, MAX_STOPS], stop tokens, padded with -1.
    sampling: how tokens are sampled.
    num_loops: i32 [B], maximum number of loops.
    exit_threshold: f32 [B], see `loop.exits.ExitPolicy`.
  """

  token: Any
  position: Any
  num_left: Any
  seen: Any
  stops: Any
  sampling: sampling.SamplingArrays
  num_loops: Any
  exit_threshold: Any


class State(NamedTuple):
  """The arrays kept on the device between two calls."""

  cache: Any
  slots: Slots


class PromptChunks(NamedTuple):
  """The next S tokens of P prompts.

  Attributes:
    tokens: i32 [P, S].
    valid: bool [P, S], false for padding.
    slot_ids: i32 [P], the prompts' slots; B, which is out of range, for a row
      without a prompt.
    is_first, is_last: bool [P], whether this is a prompt's first or last chunk.
    slots: the slots after the chunk; `token` is not used, and `seen` is [P, 0].
    num_loops: i32 [P], loops of all prompt tokens but the last, if fewer than
      in decoding, else 0; None if 0 in all rows.
  """

  tokens: Any
  valid: Any
  slot_ids: Any
  is_first: Any
  is_last: Any
  slots: Slots
  num_loops: Any = None


class Generated(NamedTuple):
  """One generated token for each row.

  Attributes:
    valid: bool [B]; false if the row has generated no token, in which case the
      other values are arbitrary.
    token: i32 [B].
    log_probability: f32 [B], under the model's own distribution.
    top_tokens, top_log_probabilities: [B, n], its most likely tokens, n at most
      MAX_TOP; arbitrary unless they are asked for.
    loops: f32 [B], number of loops that the model ran.
    finish: i32 [B], UNFINISHED, STOP or LENGTH.
  """

  valid: Any
  token: Any
  log_probability: Any
  top_tokens: Any
  top_log_probabilities: Any
  loops: Any
  finish: Any


def empty_state(
  params: Any, *, model: CachedModel, num_slots: int, vocab_size: int
) -> State:
  """An empty cache and empty slots."""
  zeros = jnp.zeros(num_slots, jnp.int32)
  slots = Slots(
    token=zeros,
    position=zeros,
    num_left=zeros,
    seen=jnp.zeros((num_slots, vocab_size), bool),
    stops=jnp.full((num_slots, MAX_STOPS), -1, jnp.int32),
    sampling=jax.tree.map(
      jnp.asarray, sampling.to_arrays([sampling.Sampling()] * num_slots)
    ),
    num_loops=zeros,
    exit_threshold=jnp.ones(num_slots),
  )
  return State(model.empty_cache(params, num_slots, model.max_tokens), slots)


def repeat(
  step: Callable[[State], tuple[State, Generated]],
  state: State,
  active: Array,
  num_steps: int,
) -> tuple[State, Generated]:
  """Generates until all active sequences end, in at most `num_steps` steps.

  Args:
    step: state -> (state, what it generated).
    state: the state before the first step.
    active: bool [B].
    num_steps: static.

  Returns:
    The state, and the generated tokens of the steps, with a leading axis
    num_steps; zeros for steps that did not run.
  """
  state, generated, _ = driver.run_loop(
    lambda state, _: step(state),
    state,
    num_steps,
    kind="while",
    done_fn=lambda state: ~jnp.any(active & (state.slots.num_left > 0)),
  )
  return state, generated


def of_rows(
  state: State, rows: Array, span: int | None, unstack: bool
) -> State:
  """The state of some slots, i32 [R]; see `Cache.of_rows`."""
  slots = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), state.slots)
  return State(state.cache.of_rows(rows, span, unstack=unstack), slots)


def with_rows(state: State, part: State, rows: Array, num_tokens: int) -> State:
  """The state of all slots, after up to `num_tokens` tokens in some."""
  slots = jax.tree.map(
    lambda old, new: old.at[rows].set(new, mode="drop"), state.slots, part.slots
  )
  return State(state.cache.with_rows(part.cache, rows, num_tokens), slots)


def fetched(generated: Generated, has_top: bool) -> Generated:
  """Generated tokens as lists on the host, which are faster than arrays.

  Args:
    generated: the tokens.
    has_top: whether the most likely tokens are asked for.
  """
  if not has_top:
    none = np.zeros((*generated.token.shape, 0))
    generated = generated._replace(top_tokens=none, top_log_probabilities=none)
  return jax.tree.map(lambda x: x.tolist(), jax.device_get(generated))


def placed(tree: Any, devices: set[jax.Device]) -> Any:
  """Sharded like the programs' results, so nothing is compiled twice."""
  return jax.device_put(tree, *devices) if len(devices) == 1 else tree
