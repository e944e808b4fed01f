"""The algorithm of MELT (arXiv 2605.07721): training, prefill and decoding.

The paper's N layers, T loops and L tokens are L, K and T here. In loop t = 1 ..
K (from 0 in the code) a layer has the residual stream r, its norm x_t, and a
latent h_t per token, which gives the token's only key and value:

  (z)    z_t = sigmoid(x_t W_z + h_{t-1} U_z + b_z)             section 3.2
  (1)    h_t = z_t h_{t-1} + (1 - z_t) x_t                      and E.1
  (kv)   k_t = RoPE(h_t W_K),  v_t = h_t W_V
  (cat)  K_t = [K, k_t],  V_t = [V, v_t]
  (x)    r_attn = r + Attn(q, K_t, V_t),  r' = r_attn + FFN(norm(r_attn))
  (a)    KV = alpha KV_MELT + (1 - alpha) KV_base               section 3.3

The paper numbers only (1) and its Jacobian (2), see `analysis.gradient_flow`;
the other marks are ours. It does not say what h_0 is: here h_0 = x_1; x_t =
norm(r) is our reading of its "hidden state". Blocks may also norm what they add
(`nn.block`), and each loop ends with the final norm, as in Ouro. The tokens of
a chunk are computed in parallel, with each other's keys and values of the same
loop; K and V are from earlier chunks after the last loop (section 3.3).

`one_loop` is the only implementation of a loop. Training repeats it in
`run_chunk`, where gradients go to earlier chunks. Prefill and decoding repeat
it on a cache, from the state that `begin_on_cache` makes. With one chunk and
z = 0 this is a looped model, and the teacher is run by the same code.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.kernels.gated_kv import gated_kv, reference
from loopjax.loop import chunks, driver
from loopjax.models.melt.config import LEARNED, Options
from loopjax.models.melt.parameters import Layer, Stack
from loopjax.nn import norm, rope
from loopjax.nn import remat as remat_lib
from loopjax.nn.attention.attend import attend_to
from loopjax.nn.attention.part import Part
from loopjax.types import Array

EMA_KEEP = 0.2  # The mean of the paper's learned gates (section 4.4.1).
KeyValues = tuple[Array, Array]  # Rotated keys, and values.
Tables = tuple[Array, Array]  # Cosines and sines of the rotation of keys.


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "length"),
  meta_fields=("span",),
)
@dataclasses.dataclass(frozen=True)
class LatentCache:
  """Keys and values of all layers, concatenated along one axis.

  Attributes:
    key, value: [B, L R, G, d_h]. Entries l R to l R + R - 1 belong to layer l;
      the first `length` of these hold tokens, the others arbitrary values. R is
      the maximum number of tokens plus one chunk, because padding at the end of
      a chunk is written too. Keys are rotated.
    length: i32 [B], number of tokens in each row of the batch.
    span: number of entries of each layer that attention reads; R if None.
  """

  key: Array
  value: Array
  length: Array
  span: int | None = None

  def capacity(self, num_layers: int) -> int:
    """R, the number of entries of each layer."""
    return self.key.shape[1] // num_layers

  def within(self, span: int | None) -> "LatentCache":
    """As in `nn.attention.cache.Cache`."""
    return dataclasses.replace(self, span=span)


class Places(NamedTuple):
  """Where a chunk's tokens are in a `LatentCache`.

  Attributes:
    start: i32 [B], index of the first one among a layer's entries.
    fits: bool [B], whether the cache has room for all of them.
    visible: bool [B, C, N], which of a layer's first N entries a token sees.
    capacity: R.
  """

  start: Array
  fits: Array
  visible: Array
  capacity: int

  def entry(self, layer: Array, live: Array | bool) -> Array:
    """Entry of the first token in a layer; -1 in rows that write nothing."""
    entry = layer * self.capacity + self.start
    return jnp.where(self.fits & live, entry, -1)

  def parts(self, layer: Array, cache: KeyValues) -> list[Part]:
    """K_t and V_t of (cat) in a layer; `update` has written the chunk's own."""
    span, start = self.visible.shape[-1], layer * self.capacity
    key, value = (
      jax.lax.dynamic_slice_in_dim(x, start, span, axis=1) for x in cache
    )
    return [Part(key, value, visible=self.visible)]


class Chunk(NamedTuple):
  """What the loops over a chunk's C tokens share; none of it has a gradient.

  Attributes:
    tables: rotary tables of their positions, [B, C, d_h / 2].
    num_before: number of tokens in earlier chunks, the only valid ones of the
      history.
    documents, row_documents: document numbers of the tokens, i32 [B, C], and of
      the whole row, i32 [B, T]; None if a row is one document.
    alpha: alpha of (a), f32 scalar; None for 1.
    targets: targets for the outputs of attention, [K, L, B, C, D], or None.
    places: where the tokens are in a cache; None without one.
  """

  tables: Any
  num_before: Any = None
  documents: Any = None
  row_documents: Any = None
  alpha: Any = None
  targets: Any = None
  places: Any = None


class State(NamedTuple):
  """What a loop passes on to the next.

  Attributes:
    hidden: residual stream [B, C, D].
    latents: h_t of all layers [L, B, C, D].
    key_values: keys and values of the chunk's tokens, [L, B, C, G, d_h] each;
      with a cache, of all its entries; None with an alpha.
  """

  hidden: Array
  latents: Array
  key_values: Any


# After the last loop of a chunk, an edit changes what is read out of it, and
# not what later chunks read.
STATE = driver.Part(
  lambda state: {
    "hidden": state.hidden,
    "latents": jnp.moveaxis(state.latents, 0, 1),
  },
  lambda old, state: old._replace(
    hidden=state["hidden"], latents=jnp.moveaxis(state["latents"], 1, 0)
  ),
)


def gate_values(layer: Layer, mode: str, t: Array, x: Array, h: Array) -> Array:
  """z_t, f32: [B, S, D]; [B, S, 1] of a scalar gate; as t of a fixed gate.

  It has no effect in the first loop, where h = x.

  Args:
    layer: the layer's parameters.
    mode: one of `config.GATES`: "mean", "ema" and "last" are the fixed gates of
      section 4.4.1, "first" is the single cache of appendix B.
    t: index of the loop, from 0, a scalar or [B, 1, 1].
    x, h: x_t and h_{t-1} [B, S, D].
  """
  if mode in LEARNED:
    return reference.gate(x, h, layer.weights())  # (z)
  t = jnp.asarray(t, jnp.float32)
  values = {
    "mean": t / (t + 1.0),
    "ema": jnp.full_like(t, EMA_KEEP),
    "last": jnp.zeros_like(t),
    "first": jnp.ones_like(t),
  }
  return values[mode]


def project(layer: Layer, h: Array, tables: Tables) -> KeyValues:
  """Rotated keys, and values, [B, S, G, d_h], of h [B, S, D]."""
  return gated_kv(h, None, layer.projections(), tables)[1]  # (kv)


def update(
  layer: Layer,
  mode: str,
  t: Array,
  x: Array,
  h: Array,
  tables: Tables,
  cache: KeyValues | None = None,
  start: Array | None = None,
) -> tuple[Array, KeyValues]:
  """h_t [B, S, D], and its keys and values.

  Args:
    layer, mode, t, x, h: as in `gate_values`.
    tables: rotary tables [B, S, d_h / 2].
    cache, start: a cache to return with the keys and values written to it, as
      in `gated_kv`. Without it they are returned, [B, S, G, d_h] each.
  """
  kernel = layer.block.attention.kernels.gated_kv
  run = functools.partial(gated_kv, implementation=kernel)
  h = jnp.where(t == 0, x, h)  # h_0 = x_1
  if mode == "element":  # (z), (1) and (kv) at once, see `gated_kv`.
    return run(x, h, layer.weights(), tables, cache, start)
  h = reference.interpolate(gate_values(layer, mode, t, x, h), h, x)  # (1)
  return run(h, None, layer.projections(), tables, cache, start)  # (kv)


def appended(
  chunk: Chunk, current: KeyValues, past: KeyValues | None
) -> list[Part]:
  """K_t and V_t of (cat): of earlier chunks, and of this one.

  Args:
    chunk: the tokens.
    current: their keys and values [B, C, G, d_h].
    past: those of the row, or of its first N tokens, [B, N, G, d_h]; None if
      the chunk is the first.
  """
  current_documents = past_documents = None
  if chunk.documents is not None:
    current_documents = chunk.documents, chunk.documents
    if past is not None:
      past_documents = (
        chunk.documents,
        chunk.row_documents[:, : past[0].shape[1]],
      )
  if past is None:
    return [Part(*current, first=0, documents=current_documents)]
  length = jnp.asarray(chunk.num_before, jnp.int32)
  return [
    Part(*current, first=0, documents=current_documents),
    Part(*past, documents=past_documents, length=length),
  ]


@jax.named_scope("attention")
def attend(layer: Layer, x: Array, tables: Tables, parts: list[Part]) -> Array:
  """Attn(q, K_t, V_t) of (x), [B, S, D]; the query is a projection of x."""
  attention = layer.block.attention
  query = rope.rotate(attention.queries(x), tables).astype(x.dtype)
  implementation = attention.kernels.attention
  mixed = attend_to(query, *parts, implementation=implementation)
  return attention.merged(mixed)


def one_loop(
  stack: Stack,
  options: Options,
  chunk: Chunk,
  state: State,
  t: Array,
  history: KeyValues | None = None,
  live: Array | bool = True,
) -> tuple[State, dict[str, Array]]:
  """A loop over the tokens of a chunk, through all layers.

  Args:
    stack, options, chunk: parameters, static options, and the tokens.
    state: the state after the previous loop.
    t: index of the loop, from 0; with a cache it may be each row's, [B, 1, 1].
    history: without a cache, keys and values of earlier chunks,
      [1 or K, L, B, N, G, d_h] each; None if there is none.
    live: bool [B], rows whose keys and values are written to the cache.

  Returns:
    (the state, records: those of `options.keep`, "hidden_norm",
    "squared_distance" [L, B, C] from targets, and with an alpha "inputs", x_t
    [L, B, C, D]).
  """
  places: Places | None = chunk.places
  stacks_key_values = places is None and chunk.alpha is None
  past = jax.tree.map(lambda x: x[t if len(x) > 1 else 0], history)
  targets = None if chunk.targets is None else chunk.targets[t]

  def run_layer(carry: Any, layer_inputs: Any) -> tuple[Any, Any]:
    hidden, cache = carry
    layer, index, h, past, target = layer_inputs
    x = layer.block.attention_norm(hidden)
    x = x.astype(layer.block.attention.precision.compute)
    start = None if places is None else places.entry(index, live)
    h, new = update(layer, options.gate, t, x, h, chunk.tables, cache, start)
    if chunk.alpha is not None:  # XLA then omits the projections of `update`.
      mixture = reference.interpolate(chunk.alpha, h, x)  # (a)
      new = project(layer, mixture, chunk.tables)
    if places is None:
      parts = appended(chunk, new, past)  # (cat)
    else:
      cache, parts = new, places.parts(index, new)  # (cat)
    mixed = attend(layer, x, chunk.tables, parts)
    record = {"attention": mixed} if "attention" in options.keep else {}
    if target is not None:
      error = mixed.astype(jnp.float32) - target
      record["squared_distance"] = jnp.mean(error**2, axis=-1)
    if chunk.alpha is not None or "inputs" in options.keep:
      record["inputs"] = x
    hidden = layer.block.add(sharding.split_by_example(hidden), mixed)  # (x)
    return (hidden, cache), (h, new if stacks_key_values else None, record)

  indices = jnp.arange(stack.num_layers)
  (hidden, cache), (latents, key_values, record) = remat_lib.scan(
    run_layer,
    (state.hidden, None if places is None else state.key_values),
    (stack.layers, indices, state.latents, past, targets),
    unroll=options.kind == "unroll",
    remat=options.remat,
  )
  hidden = stack.final_norm(hidden)
  record["hidden_norm"] = norm.mean_norm(hidden)
  if "hidden" in options.keep:
    record["hidden"] = hidden
  return State(hidden, latents, key_values if places is None else cache), record


def run_chunk(
  options: Options,
  stack: Stack,
  hidden: Array,
  chunk: Chunk,
  history: KeyValues | None,
  num_before: Array | int,
) -> tuple[tuple[Array, dict[str, Array]], KeyValues]:
  """All loops over a chunk, without a cache; the step of `chunks.run`.

  Args:
    options, stack, history: as in `one_loop`.
    hidden: embedded tokens [B, C, D].
    chunk: the tokens; its tables are [C, d_h / 2].
    num_before: as in `Chunk`.

  Returns:
    ((output [B, C, D], records), keys and values for later chunks).
  """
  batch, size, _ = hidden.shape
  cos, sin = (jnp.broadcast_to(x, (batch, *x.shape)) for x in chunk.tables)
  chunk = chunk._replace(tables=(cos, sin), num_before=num_before)
  keeps_key_values = chunk.alpha is None
  empty = stack.no_key_values(batch, size) if keeps_key_values else None
  state, records, _ = driver.run_loop(
    lambda state, t: one_loop(stack, options, chunk, state, t, history),
    State(hidden, stack.no_latents(hidden), empty),
    options.num_loops,
    kind=driver.later(options.kind, num_before // size * options.num_loops),
    part=STATE,
  )
  if keeps_key_values:
    # All loops over later chunks see those of the last loop.
    key_values = jax.tree.map(lambda x: x[None], state.key_values)
  else:  # (a), of the last loop's latents and of the inputs of each.
    inputs = records["inputs"]
    if "inputs" not in options.keep:
      del records["inputs"]
    mixtures = reference.interpolate(chunk.alpha, state.latents[None], inputs)
    of_loops = jax.vmap(jax.vmap(project, (0, 0, None)), (None, 0, None))
    key_values = of_loops(stack.layers, mixtures, chunk.tables)
  return (state.hidden, records), key_values


def run(
  stack: Stack,
  options: Options,
  hidden: Array,
  *,
  documents: Array | None = None,
  alpha: Array | None = None,
  attention: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """All loops over rows of T tokens, chunk by chunk, without a cache.

  Args:
    stack, options: parameters, and static options.
    hidden: embedded tokens [B, T, D].
    documents: i32 [B, T], a number for each document of a row; None if a row is
      one document.
    alpha: f32 scalar, see (a); None for 1. Has no gradient.
    attention: a teacher's attention outputs, [K, L, B, T, D], or None. Has no
      gradient.

  Returns:
    (the last loop's output [B, T, D], records by name). The records are
    "hidden_norm" [K]; if `attention` is given, "squared_distance", the mean
    over features of the squared distance from it, f32 [K, L, B, T]; and those
    that `options.keep` names: "hidden" [K, B, T, D]; "attention", the output
    of attention before any norm, and "inputs", x_t, both [K, L, B, T, D]. Of a
    watched loop also "state", of each chunk, see `driver.Watched`.
  """
  batch, num_tokens, _ = hidden.shape
  size = options.chunk_size or num_tokens
  num_chunks, remainder = divmod(num_tokens, size)
  assert remainder == 0, (num_tokens, size)
  positions = jnp.arange(num_tokens)[:, None]
  head_width = stack.layers.block.attention.head_width
  tables = rope.rope_tables(positions, head_width, options.rope_base)
  row = Chunk(
    tables,
    documents=documents,
    row_documents=documents,
    alpha=alpha,
    targets=attention,
  )
  step = functools.partial(run_chunk, options)
  if num_chunks == 1:
    (outputs, records), _ = step(stack, hidden, row, None, 0)
  else:
    axes = Chunk(*[chunks.EVERY] * len(row))
    axes = axes._replace(tables=0, documents=1, targets=3)
    split = functools.partial(chunks.split, num_chunks)
    loops = 1 if alpha is None else options.num_loops
    # A closure, such as an edit, has a gradient in the plain loop only.
    watched = isinstance(options.kind, driver.Watched)
    (outputs, records), _ = (chunks.run_plainly if watched else chunks.run)(
      step,
      stack,
      split(1, hidden),
      jax.tree.map(split, axes, row),
      stack.no_key_values(batch, num_tokens, loops),
    )
    token_axes = {
      "hidden": 2, "attention": 3, "inputs": 3, "squared_distance": 3,
    }  # fmt: skip
    norms = jnp.mean(records.pop("hidden_norm"), axis=0)
    states = driver.in_order(records.pop(driver.STATE)) if watched else {}
    records = {k: chunks.join(token_axes[k], x) for k, x in records.items()}
    records |= {"hidden_norm": norms, **states}
    outputs = chunks.join(1, outputs)
  return outputs, records


def begin_on_cache(
  stack: Stack, options: Options, cache: LatentCache, hidden: Array
) -> tuple[Chunk, State]:
  """The chunk and the first state of tokens that follow a cache.

  Prefill (a chunk of a prompt) and decoding (one token) then repeat `one_loop`,
  as `run_chunk` does.

  Args:
    stack, options: parameters, and static options.
    cache: the cache of the tokens before.
    hidden: embedded tokens [B, C, D].
  """
  attention, size = stack.layers.block.attention, hidden.shape[1]
  capacity = cache.capacity(stack.num_layers)
  positions = cache.length[:, None] + jnp.arange(size)[None]
  span = min(cache.span or capacity, capacity)
  visible = jnp.arange(span)[None, None] <= positions[..., None]
  fits = cache.length + size <= capacity
  tables = rope.rope_tables(
    positions[..., None], attention.head_width, options.rope_base
  )
  chunk = Chunk(tables, places=Places(cache.length, fits, visible, capacity))
  latents = stack.no_latents(hidden)  # h_0 is not read.
  return chunk, State(hidden, latents, (cache.key, cache.value))
