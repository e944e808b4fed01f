"""Loops that share the first loop's keys and values: G-SWA.

Source: Parallel Loop Transformer (arXiv 2510.24824), gated sliding-window
attention, as in IQuest-Coder's published models with loops. The first loop is a
transformer's. Later loops attend to the first loop's keys and values of all
earlier tokens and, in a window, to their own. A gate per head mixes both. The
paper's other part, loops that run in parallel for different tokens, is not
here.
"""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.models import causal, every_loop, reading
from loopjax.nn import attention, block, norm, rope
from loopjax.nn import remat as remat_lib
from loopjax.nn.attention import dot_product
from loopjax.nn.attention import window as window_lib
from loopjax.nn.attention.attend import attend_to
from loopjax.nn.attention.cache import KeyValues
from loopjax.nn.attention.part import Part
from loopjax.nn.attention.window import WindowCache
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.keys import fold_in
from loopjax.protocols import Family, Reading
from loopjax.types import PRECISIONS, Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence")


@dataclasses.dataclass(frozen=True)
class Config(causal.Config):
  """Hyper-parameters; the paper states w and K, the other defaults are ours.

  Those of `causal.Config`, and:

  Attributes:
    qk_norm: whether each head's queries and keys have an RMS norm, before the
      rotation.
    qk_bias: whether queries and keys have a bias, before the rotation.
    value_bias: whether values have one.
    rope_scaling: the four numbers of `rope.Scaling`; empty for none.
    loop_norm: "final_only": there is one norm, after the last loop, as in
      IQuest-Coder; "per_loop": every loop ends with it, as in `looped`.
    tied: whether the output layer uses the embedding table or a separate one.
    window: w, the tokens whose keys and values of its own a later loop attends
      to: a token itself and the w - 1 before it.
    gate_bias: initial value of b_h, the log-odds of the first loop's keys and
      values. With a large negative one, loops begin as those of `looped` with
      the same loop_norm, but with a window; with a large positive one, as loops
      without keys and values of their own.
  """

  qk_norm: bool = False
  qk_bias: bool = False
  value_bias: bool = False
  rope_scaling: tuple[float, ...] = ()
  loop_norm: str = "final_only"
  tied: bool = True
  window: int = checks.setting(64, least=1, own=True)
  gate_bias: float = checks.setting(0.0, own=True)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of("model", self, loop_norm=causal.LOOP_NORMS)
    rope.check_scaling(self.rope_scaling)


class WindowGates(nnx.Module):
  """The gates g = sigmoid(w_h . q_h + b_h) of all layers.

  Parameters are stacked, [L, H, d_h] and [L, H]; call those of one layer.
  """

  def __init__(self, config: Config, rngs: nnx.Rngs):
    shape, dtype = config.block_shape(), PRECISIONS[config.precision].params
    heads = config.num_layers, shape.num_heads
    self.weight = nnx.Param(
      shape.init(rngs.params(), (*heads, shape.head_width), dtype)
    )
    self.bias = nnx.Param(jnp.full(heads, config.gate_bias, dtype))

  @jax.named_scope("gate")
  def __call__(self, query: Array) -> Array:
    """The share of the first loop, f32 [B, T, H, 1], of rotated queries."""
    weight, bias = (
      x[...].astype(jnp.float32) for x in (self.weight, self.bias)
    )
    logits = jnp.einsum(
      "bthd,hd->bth", query.astype(jnp.float32), weight, precision="highest"
    )
    return jax.nn.sigmoid(logits + bias[None, None])[..., None]


class Model(nnx.Module):
  """A stack applied K times, whose loops share the first one's keys."""

  embed = causal.embed
  readout_input = causal.readout_input
  logits = causal.logits
  readout_table = causal.readout_table

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
    self.window_gates = WindowGates(config, rngs)
    self.final_norm = causal.final_norm(config, rngs)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Any = None,
    valid: Array | None = None,
    keys: Array | None = None,
    targets: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`; padding may be anywhere.
      trace: names from TRACES, as in `looped.Model`; without padding.
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, [K, B, ...].
    """
    packing = None if valid is None else fast_weights.packing(valid)
    if packing is not None:  # Sums over tokens are the same with any padding.
      inputs = jnp.take_along_axis(inputs, packing.order, axis=1)
      valid = packing.packed_mask
    call = causal.begin(
      self, inputs, num_loops, kind, documents, cache, valid, keys
    )

    if documents is not None:
      # Gates depend on positions, not only on their differences.
      positions = attention.places_in(documents)[..., None]
      width = self.config.block_shape().head_width
      rotation = self.config.rope_base, self.config.rope_scaling
      tables = rope.rope_tables(positions, width, *rotation)
      call = call._replace(metadata=call.metadata._replace(tables=tables))

    def record(before: Array, hidden: Array) -> every_loop.Record:
      stats = {"hidden_norm": norm.mean_norm(hidden)}
      return every_loop.record(
        self, trace, stats, before=before, targets=targets, hidden=hidden
      )

    def first_loop(carry: tuple[Array], k: Array | int) -> tuple[Any, Any]:
      del k
      after, *shared = self._first_loop(call, cache, carry[0])
      return (after, *shared), record(carry[0], after)

    def later_loop(carry: tuple[Array], k: Array) -> tuple[Any, Any]:
      (hidden,) = carry
      after, recent = self._later_loop(call, later_cache, hidden, first, k)
      return (after,), (recent, record(hidden, after))

    watched: Any = {"kind": call.kind, "part": causal.STATE}
    recent = None
    (hidden, later_cache, first), records = driver.run_once(
      first_loop, (self.embed(inputs, keys),), 0, **watched
    )
    if call.num_loops > 1:
      (hidden,), (recent, later_records), _ = driver.run_loop(
        later_loop, (hidden,), call.num_loops - 1, first=1, **watched
      )
      records = every_loop.joined(records, later_records)
    hidden = fast_weights.unpack(hidden, packing)
    output = causal.output(self, call, (hidden, None), records, call.num_loops)
    if later_cache is None:
      return output
    places = call.metadata.places
    return output._replace(cache=later_cache.extended(recent, places))

  def _first_loop(
    self, call: causal.Call, cache: Any, hidden: Array
  ) -> tuple[Array, Any, KeyValues | None]:
    """A transformer's loop, whose keys and values are kept.

    They are in the cache or, without one, returned: [L, B, T, G, d_h].
    """
    metadata = call.metadata

    def step(carry: Any, layer_inputs: Any) -> tuple[Any, KeyValues | None]:
      x, cache = carry
      layer, keys, index = layer_inputs
      query, key_values = _projected(layer, x, metadata)
      if cache is not None:
        cache = cache.write_first(index, key_values, metadata.places)
      mixed = self._to_first(query, metadata, cache, index, key_values)
      x = layer.add(x, layer.attention.merged(mixed), keys)
      return (x, cache), key_values if cache is None else None

    (hidden, cache), key_values = self._run_layers(
      step, call, (hidden, cache), 0
    )
    return self._normed(hidden), cache, key_values

  def _later_loop(
    self,
    call: causal.Call,
    cache: Any,
    hidden: Array,
    first: KeyValues | None,
    loop: Array,
  ) -> tuple[Array, KeyValues | None]:
    """Loop k > 0, counted from 0: y = g global + (1 - g) local in each layer.

    With a cache, also returns the keys and values that a window keeps,
    [L, B, min(T, w), G, d_h].
    """
    metadata, window = call.metadata, self.config.window
    first_slot = (loop - 1) * self.config.num_layers
    if cache is not None:
      visible = cache.visible_recent(metadata.places)
      last_tokens = jnp.maximum(cache.last_tokens(metadata.places), 0)
      last_tokens = last_tokens[:, :, None, None]

    def step(x: Array, layer_inputs: Any) -> tuple[Array, KeyValues | None]:
      layer, keys, index, gates, shared = layer_inputs
      query, key_values = _projected(layer, x, metadata)
      recent = [_causal_part(key_values, metadata.documents, reach=window)]
      if cache is not None:
        recent += [cache.read_recent(first_slot + index, visible)]
      share = gates(query)
      mixed = share * self._to_first(query, metadata, cache, index, shared)
      mixed += (1 - share) * self._attend(query, *recent)
      x = layer.add(x, layer.attention.merged(mixed), keys)
      if cache is None:
        return x, None
      return x, KeyValues(
        *(jnp.take_along_axis(y, last_tokens, axis=1) for y in key_values)
      )

    extra = self.window_gates, first
    hidden, window_key_values = self._run_layers(
      step, call, hidden, loop, *extra
    )
    return self._normed(hidden), window_key_values

  def _to_first(
    self,
    query: Array,
    metadata: attention.Metadata,
    cache: Any,
    layer: Array,
    key_values: KeyValues | None,
  ) -> Array:
    """Attention to the first loop's keys and values of all earlier tokens."""
    if cache is None:
      assert key_values is not None
      return self._attend(query, _causal_part(key_values, metadata.documents))
    assert metadata.visible is not None
    mixed = dot_product.attend_by_head(
      query, *cache.first.read(layer), visible=metadata.visible
    )
    return mixed.astype(jnp.float32)

  def _attend(self, query: Array, *parts: Part) -> Array:
    kernel = KERNELS[self.options.kernels].attention
    return attend_to(query, *parts, implementation=kernel).astype(jnp.float32)

  def _run_layers(
    self, step: Any, call: causal.Call, carry: Any, loop: Any, *extra: Any
  ) -> tuple[Any, Any]:
    """Applies `step` to every layer, its random keys, index, and `extra`."""
    if isinstance(self.layers, nnx.List):  # See `stack.unstacked`.
      records = []
      for index, layer in enumerate(self.layers):
        layer_inputs = jax.tree.map(operator.itemgetter(index), extra)
        carry, record = step(carry, (layer, None, index, *layer_inputs))
        records.append(record)
      return carry, jax.tree.map(lambda *x: jnp.stack(x), *records)
    indices, keys = jnp.arange(self.config.num_layers), None
    if call.keys is not None:
      loop_keys = fold_in(call.keys, loop + 1)
      keys = jax.vmap(fold_in, (None, 0))(loop_keys, indices)
    return remat_lib.scan(
      step,
      carry,
      (self.layers, keys, indices, *extra),
      unroll=call.kind == "unroll",
      remat=self.options.remat,
    )

  def _normed(self, hidden: Array) -> Array:
    """The state after a loop's last layer, after the norm if "per_loop"."""
    ends_in_norm = self.config.loop_norm == "per_loop"
    return self.final_norm(hidden) if ends_in_norm else hidden


def _projected(
  layer: Any, x: Array, metadata: attention.Metadata
) -> tuple[Array, KeyValues]:
  """The rotated queries, and the keys and values, of a layer's input."""
  query, *key_values = layer.attention.rotated(
    layer.attention_norm(x), metadata.tables
  )
  return query, KeyValues(*key_values)


def _causal_part(
  key_values: KeyValues, documents: Array | None, reach: int | None = None
) -> Part:
  """The tokens' own keys and values, to which earlier ones do not attend."""
  pair = None if documents is None else (documents, documents)
  return Part(
    key_values.key, key_values.value, first=0, reach=reach, documents=pair
  )


def untrained(config: Config) -> str:
  """See `Family.untrained`: without later loops, the gates."""
  return "^window_gates/" if config.num_loops == 1 else ""


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> WindowCache:
  """See `Reading.empty_cache`."""
  del kind  # There is one kind.
  config = model.config
  return window_lib.empty(
    config.block_shape(),
    config.num_layers,
    checks.num_loops(config, num_loops),
    config.window,
    batch,
    max_tokens,
    PRECISIONS[config.precision],
  )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  Later loops attend twice; the window counts all pairs of tokens, which are
  computed too.
  """
  shape, tokens = config.block_shape(), spec.sequence_length
  first = config.num_layers * block.flops(shape, tokens)
  queries = tokens * shape.num_heads * shape.head_width
  # Logits and weighted sum of the second attention, and the gates.
  window = config.num_layers * 2 * queries * (2 * tokens + 1)
  head = 2 * tokens * config.width * spec.vocab_size
  by_loop = block.flops_by_loop(head, first, num_loops, between=window)
  return {"flops_per_example": by_loop}


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=causal.loss,
  costs=costs,
  traces=TRACES,
  untrained=untrained,
  reads_out_every_loop=every_loop.reads_out_every_loop,
  reading=Reading(
    # A window forgets: no prefix can be shared, and no loop skipped, which
    # would leave a gap in it.
    caches=("window",),
    empty_cache=empty_cache,
    read=reading.read,
    has_span=True,
    unstacked=reading.unstacked,
  ),
)
