"""Self-speculative decoding: fewer loops draft tokens, all loops verify them.

In a round, m loops draft n tokens, one after another. The remaining loops run
on all n at once, resuming from the states and keys of the draft, and choose
each next token as without drafts, with the random numbers of its position,
which the draft also used. A draft equal to this token is accepted; after the
first different one, the rest of the draft is dropped. The text is the same as
without drafts, for any m, n and other rows (Gumbel coupling, arXiv 2408.07978).
No extra token is sampled after the last draft.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.generate import sampling
from loopjax.generate.programs import slots as slots_lib
from loopjax.generate.programs.cached_model import CachedModel, read_out
from loopjax.generate.programs.slots import Generated, Slots, State
from loopjax.loop import exits
from loopjax.types import Array


class _Draft(NamedTuple):
  """Drafts of B rows; scanned, with a leading axis n.

  Attributes:
    read: i32 [B], the token that was read.
    token: i32 [B], the drafted token after it.
    state: [B, 1, D], the state of `read` after m loops.
    seen: bool [B, V], the tokens before `token`.
  """

  read: Any
  token: Any
  state: Any
  seen: Any


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
    params: the model's parameters, from `CachedModel.for_decoding`.
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
  model: Any = nnx.merge(cached_model.graphdef, params)

  def read(tokens: Array, cache: Any, live: Array, **options: Any) -> Any:
    valid = jnp.broadcast_to(live[:, None], tokens.shape)
    threshold = jnp.ones(len(tokens))
    return cached_model.read(
      model, tokens, cache, valid=valid, exit_threshold=threshold, span=span,
      **options,
    )  # fmt: skip

  def draft(cache: Any, slots: Slots, live: Array) -> tuple[Any, _Draft]:
    loops = jnp.full(len(live), draft_loops, jnp.int32)

    def draft_token(carry: Any, place: Array) -> tuple[Any, _Draft]:
      token, seen, cache = carry
      output, cache = read(token[:, None], cache, live, num_loops=loops)
      logits = read_out(model, output.hidden[:, 0])
      position = slots.position + place
      new = sampling.draw(logits, seen, slots.sampling, position)
      drafted = _Draft(token, new, output.trace["state"], seen)
      seen_after = slots_lib.with_seen(seen, new, live)
      return (new, seen_after, cache), drafted

    start = slots.token, slots.seen, cache
    (_, _, cache), drafts = jax.lax.scan(
      draft_token, start, jnp.arange(num_drafts)
    )
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
    drafts: the round's drafts.
    logits: the logits after all loops, f32 [n, B, V].
    live: bool [B].
    loops: f32 [B], loops that the model ran.
    num_top: number of most likely tokens to report.
  """
  num, rows, vocab_size = logits.shape
  places = jnp.arange(num)[:, None]

  settings = jax.tree.map(lambda x: jnp.tile(x, num), before.sampling)
  positions = _flat(before.position[None] + places)
  token = sampling.draw(_flat(logits), _flat(drafts.seen), settings, positions)
  token = token.reshape(num, rows)
  accepts = token == drafts.token
  is_stop = jnp.any(token[..., None] == before.stops[None], axis=-1)
  is_last = before.num_left[None] - places <= 1
  ends = ~accepts | is_stop | is_last
  valid = live[None] & (jnp.cumsum(ends, axis=0) - ends == 0)
  generated = slots_lib.generated(
    logits,
    token,
    is_stop,
    is_last,
    num_top,
    valid=valid,
    loops=jnp.broadcast_to(loops, token.shape),
    draft=jnp.where(accepts, slots_lib.ACCEPTED, slots_lib.REJECTED),
    computed=jnp.where(places == 0, num * loops, 0.0),
  )
  count = jnp.sum(valid, axis=0, dtype=jnp.int32)
  last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[None], axis=0)[0]
  num_left = jnp.where(
    jnp.any(valid & is_stop, axis=0), 0, before.num_left - count
  )
  columns = jnp.broadcast_to(jnp.arange(rows), token.shape)
  return before._replace(
    token=jnp.where(live, last, before.token),
    position=before.position + count,
    num_left=jnp.where(live, num_left, before.num_left),
    seen=before.seen.at[columns, jnp.where(valid, token, vocab_size)].set(
      True, mode="drop"
    ),
  ), generated


def _flat(x: Array) -> Array:
  """The first two axes as one."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
