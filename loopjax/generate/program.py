"""What the engine runs on a device: reading prompts, and writing on.

Shapes are static: every slot holds a text or none, and a slot without a text
takes part in every step without effect. Buffers are donated and updated in
place.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.generate import sampling
from loopjax.loop import exits
from loopjax.nn import linear
from loopjax.protocols import CausalFamily, ExitsEarly, HasSpan, StacksLayers
from loopjax.types import PRECISIONS, Array, Output

MAX_STOPS = 8  # Tokens that end a text.
MAX_TOP = 20  # Most likely tokens that are reported beside the drawn one.
NONE, STOP, LENGTH = range(3)  # How a text ends with a token.


class Rows(NamedTuple):
  """Texts in B slots, beside the cache.

  Attributes:
    token: i32 [B], the last one, not yet read.
    place: i32 [B], of the token after it.
    left: i32 [B], tokens that may still be drawn; 0 for a slot without a text.
    seen: bool [B, V], tokens of the text.
    stops: i32 [B, MAX_STOPS], tokens that end it; the others -1.
    sampling: how tokens are drawn.
    num_loops: i32 [B], that a token may run.
    exit_threshold: f32 [B], see `loop.exits`.
  """

  token: Any
  place: Any
  left: Any
  seen: Any
  stops: Any
  sampling: sampling.Rows
  num_loops: Any
  exit_threshold: Any


class State(NamedTuple):
  """All that is kept between two calls."""

  cache: Any
  rows: Rows


class Record(NamedTuple):
  """A token for each row.

  Attributes:
    drawn: bool [B]; nothing else counts where it is false.
    token: i32 [B].
    log_probability: f32 [B], of the model's logits as they are.
    top_tokens, top_log_probabilities: [B, n], the most likely ones.
    loops: f32 [B], loops that the model ran for it.
    finish: i32 [B], NONE, STOP or LENGTH.
  """

  drawn: Array
  token: Array
  log_probability: Array
  top_tokens: Array
  top_log_probabilities: Array
  loops: Array
  finish: Array


class Prompts(NamedTuple):
  """Parts of P prompts, and what to do when they end.

  Attributes:
    tokens: i32 [P, S]. valid: bool [P, S], those that are there.
    slots: i32 [P]; the number of slots, which is none, for no prompt.
    is_first, is_last: bool [P], of the parts of a prompt.
    rows: of the slots after the last part, where `token` has no meaning, and
      `seen` is [P, 0].
  """

  tokens: Any
  valid: Any
  slots: Any
  is_first: Any
  is_last: Any
  rows: Rows


class Reader(NamedTuple):
  """A model and how it is read; static.

  Attributes:
    family: of the model. graphdef: the model without its parameters.
    num_loops: of the cache. max_tokens, prompt_tokens: of a row of it. kind: of
      it.
    rule, kept: as in `loop.exits.ExitPolicy`, if the family has exits.
    platform: of the devices.
  """

  family: CausalFamily
  graphdef: nnx.GraphDef
  num_loops: int
  max_tokens: int
  prompt_tokens: int
  kind: str
  rule: str
  kept: str
  platform: str

  def empty_cache(self, params: Any, batch: int, max_tokens: int) -> Any:
    """As in `CausalFamily`."""
    model: Any = nnx.merge(self.graphdef, params)
    return self.family.empty_cache(
      model,
      batch,
      max_tokens,
      num_loops=self.num_loops,
      kind=self.kind,
      prompt_tokens=self.prompt_tokens,
    )

  def read(
    self,
    model: Any,
    tokens: Array,
    cache: Any,
    valid: Array,
    rows: Rows,
    span: int | None,
  ) -> tuple[Output, Any]:
    """As in `CausalFamily`, with the exits of rows, within a span."""
    options: dict[str, Any] = {"num_loops": self.num_loops, "valid": valid}
    if isinstance(self.family, ExitsEarly):
      options["exit_policy"] = exits.ExitPolicy(
        rows.exit_threshold, rows.num_loops, self.rule, self.kept
      )
    if not isinstance(cache, HasSpan):
      return self.family.read(model, tokens, cache, **options)
    output, cache = self.family.read(
      model, tokens, cache.within(span), **options
    )
    return output, cache.within(None)

  def batch_axes(self, params: Any) -> Any:
    """The axis of each leaf of a cache that grows with its rows; -1 if none."""

    def shapes(batch: int) -> Any:
      return jax.eval_shape(
        functools.partial(
          self.empty_cache, batch=batch, max_tokens=self.max_tokens
        ),
        params,
      )

    def axis(few: Any, more: Any) -> int:
      pairs = enumerate(zip(few.shape, more.shape, strict=True))
      return next((i for i, (m, n) in pairs if m != n), -1)

    return jax.tree.map(axis, shapes(1), shapes(2))


class Programs(NamedTuple):
  """Compiled when first called; the state is donated.

  Attributes:
    prefill: (params, state, prompts, num_top=, span=) -> (state, record).
    decode: (params, state, kept, num_top=, span=, early=) -> (state, records).
  """

  prefill: Any
  decode: Any


@functools.lru_cache(maxsize=8)
def programs(reader: Reader, axes: Any, num_steps: int) -> Programs:
  """Those of a model, which engines share; see `prefill` and `decode`."""
  read = functools.partial(prefill, reader=reader, axes=axes)
  write = functools.partial(decode, reader=reader, num_steps=num_steps)
  static = ("num_top", "span")
  return Programs(
    jax.jit(read, static_argnames=static, donate_argnames="state"),
    jax.jit(write, static_argnames=(*static, "early"), donate_argnames="state"),
  )


def empty_state(
  params: Any, *, reader: Reader, num_slots: int, vocab_size: int
) -> State:
  """Slots without texts."""
  nothing = jnp.zeros(num_slots, jnp.int32)
  rows = Rows(
    token=nothing,
    place=nothing,
    left=nothing,
    seen=jnp.zeros((num_slots, vocab_size), bool),
    stops=jnp.full((num_slots, MAX_STOPS), -1, jnp.int32),
    sampling=jax.tree.map(
      jnp.asarray, sampling.rows([sampling.Sampling()] * num_slots)
    ),
    num_loops=nothing,
    exit_threshold=jnp.ones(num_slots),
  )
  return State(reader.empty_cache(params, num_slots, reader.max_tokens), rows)


def prefill(
  params: Any,
  state: State,
  prompts: Prompts,
  *,
  reader: Reader,
  axes: Any,
  num_top: int,
  span: int | None,
) -> tuple[State, Record]:
  """Reads parts of prompts, and draws a token after each that ends.

  Args:
    params: of the model.
    state: donated.
    prompts: the parts.
    reader: the model.
    axes: from `Reader.batch_axes`.
    num_top: most likely tokens to record.
    span: places of a row that hold all tokens of these, parts included.

  Returns:
    The state; a record [P].
  """
  model: Any = nnx.merge(reader.graphdef, params)
  slots, num_rows = prompts.slots, len(prompts.slots)
  empty = reader.empty_cache(params, num_rows, reader.max_tokens)
  part = jax.tree.map(
    lambda axis, old, new: _taken(axis, old, new, slots, prompts.is_first),
    axes,
    state.cache,
    empty,
  )
  output, part = reader.read(
    model, prompts.tokens, part, prompts.valid, prompts.rows, span
  )
  cache = jax.tree.map(
    lambda axis, old, new: _put(axis, old, new, slots), axes, state.cache, part
  )
  seen = state.rows.seen.at[slots].get(mode="clip")
  seen &= ~prompts.is_first[:, None]
  token = jnp.where(prompts.valid, prompts.tokens, seen.shape[1])
  each = jnp.arange(num_rows)
  seen = seen.at[each[:, None], token].set(True, mode="drop")
  last = jnp.maximum(jnp.sum(prompts.valid, axis=1) - 1, 0)
  rows, record = _draw(
    model,
    output.hidden[each, last],
    prompts.rows._replace(seen=seen),
    prompts.is_last,
    output.stats["loops_run"],
    num_top,
  )
  rows = jax.tree.map(
    lambda old, new: _put(0, old, new, slots), state.rows, rows
  )
  return State(cache, rows), record


def decode(
  params: Any,
  state: State,
  kept: Array,
  *,
  reader: Reader,
  num_steps: int,
  num_top: int,
  span: int | None,
  early: bool,
) -> tuple[State, Record]:
  """Draws up to `num_steps` tokens for every text.

  Args:
    params: of the model.
    state: donated.
    kept: bool [B]; a text that is not is left where it is.
    reader: the model.
    num_steps: at most; fewer if all texts have ended.
    num_top: most likely tokens to record.
    span: places of a row that hold all tokens of these, new ones included.
    early: whether any row has a threshold below 1; without, what follows from
      exits is not computed.

  Returns:
    The state; a record [num_steps, B].
  """
  reader = reader if early else reader._replace(rule="fixed")
  model: Any = nnx.merge(reader.graphdef, params)
  if reader.platform == "cpu" and isinstance(reader.family, StacksLayers):
    model = reader.family.unstacked(model)
  rows = state.rows
  state = State(state.cache, rows._replace(left=jnp.where(kept, rows.left, 0)))

  def one(state: State) -> tuple[State, Record]:
    cache, rows = state
    live = rows.left > 0
    output, cache = reader.read(
      model, rows.token[:, None], cache, live[:, None], rows, span
    )
    rows, record = _draw(
      model,
      output.hidden[:, 0],
      rows,
      live,
      output.stats["loops_run"],
      num_top,
    )
    return State(cache, rows), record

  def go_on(carry: tuple[Array, State, Record]) -> Array:
    n, state, _ = carry
    return (n < num_steps) & jnp.any(state.rows.left > 0)

  def step(carry: tuple[Array, State, Record]) -> tuple[Array, State, Record]:
    n, state, records = carry
    state, record = one(state)
    records = jax.tree.map(lambda x, new: x.at[n].set(new), records, record)
    return n + 1, state, records

  records = jax.tree.map(
    lambda x: jnp.zeros((num_steps, *x.shape), x.dtype),
    jax.eval_shape(one, state)[1],
  )
  start = jnp.asarray(0), state, records
  _, state, records = jax.lax.while_loop(go_on, step, start)
  return state, records


def _draw(
  model: Any,
  hidden: Array,
  rows: Rows,
  live: Array,
  loops: Array,
  num_top: int,
) -> tuple[Rows, Record]:
  """The next token of rows that are live, from the read-out's input [B, D]."""
  # As in training and scoring.
  compute = PRECISIONS[model.config.precision].compute
  table = model.readout_table().astype(compute)
  logits = linear.token_logits(
    hidden.astype(compute), table, model.spec.num_padding_tokens
  )
  token = sampling.draw(logits, rows.seen, rows.sampling, rows.place)
  each, total = jnp.arange(len(token)), jax.nn.logsumexp(logits, axis=-1)
  best, top_tokens = jax.lax.top_k(logits, num_top)
  stops = jnp.any(token[:, None] == rows.stops, axis=1)
  ends = jnp.where(rows.left > 1, NONE, LENGTH)
  record = Record(
    drawn=live,
    token=token,
    log_probability=logits[each, token] - total,
    top_tokens=top_tokens,
    top_log_probabilities=best - total[:, None],
    loops=loops,
    finish=jnp.where(stops, STOP, ends),
  )
  more = live.astype(jnp.int32)
  return rows._replace(
    token=jnp.where(live, token, rows.token),
    place=rows.place + more,
    left=jnp.where(live & ~stops, rows.left - 1, 0),
    seen=rows.seen.at[each, jnp.where(live, token, rows.seen.shape[1])].set(
      True, mode="drop"
    ),
  ), record


def _taken(
  axis: int, old: Array, new: Array, slots: Array, is_new: Array
) -> Array:
  """Rows of a leaf of the cache, or of an empty one where they are new."""
  if axis < 0:
    return old
  old = jnp.take(old, slots, axis=axis, mode="clip")
  by_row = [1] * old.ndim
  by_row[axis] = len(slots)
  return jnp.where(is_new.reshape(by_row), new, old)


def _put(axis: int, old: Array, new: Array, slots: Array) -> Array:
  """A leaf with other rows in slots, of which one too large is none."""
  if axis < 0:
    return new
  return old.at[(slice(None),) * axis + (slots,)].set(new, mode="drop")
