"""Drafts by fewer loops of the same model, which all its loops then check.

In a round m loops draft n tokens, one after another. The loops after them run
on all n at once, from the states and keys that the draft left, and give the
model's own distribution p of every token, where the draft's was q. A draft x is
accepted with probability min(1, p(x) / q(x)); else a token is drawn from the
positive part of p - q, and the rest of the draft is dropped (arXiv 2211.17192).
Both distributions are those after penalty, temperature and truncation; without
a temperature the text is that without drafts. A token depends on the tokens
before it, the seed and m alone, not on n, where a round began, or other rows:
there is no token after the last draft that none drafted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.generate import sampling
from loopjax.generate.programs import slots as slots_lib
from loopjax.generate.programs.cached_model import CachedModel, read_out
from loopjax.generate.programs.slots import Generated, Slots, State
from loopjax.generate.sampling import SamplingArrays
from loopjax.loop import exits
from loopjax.types import Array

_DRAFT, _ACCEPT, _REST = 1, 2, 3  # Streams of random numbers.


class _Draft(NamedTuple):
  """Drafts of B rows; scanned, with a leading axis n.

  Attributes:
    read: i32 [B], the token that was read.
    token: i32 [B], the drafted token after it.
    state: [B, 1, D], the state of `read` after m loops.
    seen: bool [B, V], the tokens before `token`.
    chances: f32 [B, V], log q; arbitrary if all rows are greedy.
  """

  read: Any
  token: Any
  state: Any
  seen: Any
  chances: Any


def speculate(
  params: Any,
  state: State,
  active: Array,
  *,
  cached_model: CachedModel,
  draft_loops: Array,
  num_drafts: int,
  num_rounds: int,
  num_top: int,
  span: int | None,
) -> tuple[State, Generated]:
  """Generates up to `num_rounds` times `num_drafts` tokens in active slots.

  Args:
    params: the model's parameters.
    state: donated.
    active: bool [B]; the sequences in other slots wait.
    cached_model: the model without its parameters; see `check_drafts`.
    draft_loops: m, less than the loops of any active slot; i32 scalar.
    num_drafts: n.
    num_rounds: maximum number of rounds; fewer if all sequences end before.
    num_top: number of most likely tokens to report.
    span: as in `program.decode`.

  Returns:
    The state, and the generated tokens [num_rounds num_drafts, B].
  """
  # No exits: nothing is skipped that would have to be kept or computed.
  cached_model = cached_model._replace(exit_rule="fixed", exit_kept="copy")
  model = cached_model.for_decoding(params)

  def read(tokens: Array, cache: Any, live: Array, **options: Any) -> Any:
    valid = jnp.broadcast_to(live[:, None], tokens.shape)
    threshold = jnp.ones(len(tokens))
    return cached_model.read(
      model, tokens, cache, valid=valid, exit_threshold=threshold, span=span,
      **options,
    )  # fmt: skip

  def draft(cache: Any, slots: Slots, live: Array) -> tuple[Any, _Draft]:
    loops = jnp.full(len(live), draft_loops, jnp.int32)

    def one(carry: Any, place: Array) -> tuple[Any, _Draft]:
      token, seen, cache = carry
      output, cache = read(token[:, None], cache, live, num_loops=loops)
      logits = read_out(model, output.hidden[:, 0])
      new, chances = _drafted(
        logits, seen, slots.sampling, slots.position + place
      )
      drafted = _Draft(token, new, output.trace["state"], seen, chances)
      return (new, _with(seen, new, live), cache), drafted

    start = slots.token, slots.seen, cache
    (_, _, cache), drafts = jax.lax.scan(one, start, jnp.arange(num_drafts))
    return cache, drafts

  def one_round(state: State) -> tuple[State, Generated]:
    cache, slots = state
    live = active & (slots.num_left > 0)
    num_read = slots.position - 1  # The last token is yet to be read.
    cache, drafts = draft(cache, slots, live)
    output, cache = read(
      drafts.read.T,
      cache.cut(num_read, live),
      live,
      num_loops=slots.num_loops,
      resumed=exits.Resumed(
        jnp.swapaxes(drafts.state[:, :, 0], 0, 1), draft_loops
      ),
    )
    logits = jnp.swapaxes(read_out(model, output.hidden), 0, 1)  # [n, B, V]
    loops = output.stats["loops_run"]
    new, generated = _checked(slots, drafts, logits, live, loops, num_top)
    return State(cache.cut(new.position - 1, live), new), generated

  state, generated = slots_lib.repeat(one_round, state, active, num_rounds)
  return state, jax.tree.map(_flat, generated)


def _drafted(
  logits: Array,
  seen: Array,
  settings: SamplingArrays,
  position: Array,
) -> tuple[Array, Array]:
  """A draft of each row, i32 [B], and log q [B, V] if any was drawn."""

  def drawn() -> tuple[Array, Array]:
    chances = sampling.log_chances(logits, seen, settings)
    noise = sampling.gumbel(settings.seed, position, logits.shape[-1], _DRAFT)
    return jnp.argmax(chances + noise, axis=-1).astype(jnp.int32), chances

  def most_likely() -> tuple[Array, Array]:
    return _most_likely(logits, seen, settings), jnp.zeros_like(logits)

  return jax.lax.cond(_any_random(settings), drawn, most_likely)


def accepted(
  draft: Array,
  drafted_with: Array,
  chances: Array,
  seeds: Array,
  positions: Array,
) -> tuple[Array, Array]:
  """Accepts drafts, or draws other tokens, so that these have distribution p.

  Args:
    draft: i32 [R].
    drafted_with: log q, f32 [R, V], that the draft was drawn with.
    chances: log p, f32 [R, V].
    seeds, positions: of the random numbers, [R].

  Returns:
    (whether the draft was accepted, bool [R]; the token, i32 [R]).
  """
  at = draft[:, None]
  ratio = jnp.take_along_axis(chances, at, axis=1) - jnp.take_along_axis(
    drafted_with, at, axis=1
  )
  accepts = jnp.log(sampling.uniform(seeds, positions, _ACCEPT)) <= ratio[:, 0]
  p, q = jnp.exp(chances), jnp.exp(drafted_with)
  # If rounding leaves nothing of p - q, p is as good.
  rest = jnp.maximum(p - q, 0.0)
  rest = jnp.where(jnp.any(rest > 0, axis=1, keepdims=True), rest, p)
  noise = sampling.gumbel(seeds, positions, chances.shape[1], _REST)
  other = jnp.argmax(jnp.log(rest) + noise, axis=1).astype(jnp.int32)
  return accepts, jnp.where(accepts, draft, other)


def _checked(
  before: Slots,
  drafts: _Draft,
  logits: Array,
  live: Array,
  loops: Array,
  num_top: int,
) -> tuple[Slots, Generated]:
  """The slots after a round, and its tokens [n, B].

  Args:
    before: the slots before the round.
    drafts: of the round.
    logits: of all loops, f32 [n, B, V].
    live: bool [B].
    loops: f32 [B], loops that the model ran.
    num_top: number of most likely tokens to report.
  """
  num, rows, vocab_size = logits.shape
  places = jnp.arange(num)[:, None]

  settings = jax.tree.map(lambda x: jnp.tile(x, num), before.sampling)
  flat, seen = _flat(logits), _flat(drafts.seen)

  def drawn() -> tuple[Array, Array]:
    return accepted(
      _flat(drafts.token),
      _flat(drafts.chances),
      sampling.log_chances(flat, seen, settings),
      settings.seed,
      _flat(before.position[None] + places),
    )

  def most_likely() -> tuple[Array, Array]:
    token = _most_likely(flat, seen, settings)
    return token == _flat(drafts.token), token

  accepts, token = jax.lax.cond(_any_random(settings), drawn, most_likely)
  accepts, token = accepts.reshape(num, rows), token.reshape(num, rows)
  stops = jnp.any(token[..., None] == before.stops[None], axis=-1)
  ends = ~accepts | stops | (before.num_left[None] - places <= 1)
  valid = live[None] & (jnp.cumsum(ends, axis=0) - ends == 0)
  total = jax.nn.logsumexp(logits, axis=-1)
  at_token = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
  best, top_tokens = jax.lax.top_k(logits, num_top)
  is_last = before.num_left[None] - places <= 1
  finish = jnp.where(is_last, slots_lib.LENGTH, slots_lib.UNFINISHED)
  generated = Generated(
    valid=valid,
    token=token,
    log_probability=at_token - total,
    top_tokens=top_tokens,
    top_log_probabilities=best - total[..., None],
    loops=jnp.broadcast_to(loops, token.shape),
    finish=jnp.where(stops, slots_lib.STOP, finish),
    draft=jnp.where(accepts, slots_lib.ACCEPTED, slots_lib.REJECTED),
    computed=jnp.where(places == 0, num * loops, 0.0),
  )
  count = jnp.sum(valid, axis=0, dtype=jnp.int32)
  last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[None], axis=0)[0]
  left = jnp.where(jnp.any(valid & stops, axis=0), 0, before.num_left - count)
  each = jnp.broadcast_to(jnp.arange(rows), token.shape)
  return before._replace(
    token=jnp.where(live, last, before.token),
    position=before.position + count,
    num_left=jnp.where(live, left, before.num_left),
    seen=before.seen.at[each, jnp.where(valid, token, vocab_size)].set(
      True, mode="drop"
    ),
  ), generated


def _any_random(settings: SamplingArrays) -> Array:
  """Whether any row has a temperature; else there is nothing to draw."""
  return jnp.any(settings.temperature > 0)


def _most_likely(logits: Array, seen: Array, settings: SamplingArrays) -> Array:
  """The most likely token of each row, after the penalty, i32 [B]."""
  scores = sampling.penalised(logits, seen, settings.repetition_penalty)
  return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def _flat(x: Array) -> Array:
  """The first two axes as one."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _with(seen: Array, token: Array, live: Array) -> Array:
  """Tokens seen, bool [B, V], and one more in the live rows."""
  added = jnp.where(live, token, seen.shape[1])
  return seen.at[jnp.arange(len(seen)), added].set(True, mode="drop")
