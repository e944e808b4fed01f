"""Recurrent depth: a prelude, a core that is applied K times, and a coda.

Sources: Huginn (arXiv 2502.05171, section 3): e = P(x), h_0 random,
h_k = R(e, h_{k-1}), logits = C(h_K); training with a random number of loops and
gradients through the last ones. Parcae (arXiv 2604.12946), xLLM-Loop, the
boundary operator (arXiv 2609.19107) and LoopLM are other settings of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import sharding
from loopjax.loop import depth as depth_lib
from loopjax.loop import driver
from loopjax.models import causal
from loopjax.models.recurrent import injection
from loopjax.models.recurrent.cache import PartsCache
from loopjax.models.recurrent.config import Config
from loopjax.nn import linear, norm, stack
from loopjax.nn.dropout import dropout
from loopjax.nn.keys import fold_in
from loopjax.types import (
  PRECISIONS,
  Array,
  LoopOptions,
  Output,
  TaskSpec,
)

TRACES = ("hidden", "prediction", "confidence")
HEADLINE: tuple[str, ...] = ()
_EPSILON = 1e-6  # Of the norms without a gain.
# What random keys are folded with; dropout of the loops has 1, 2, ...
_PRELUDE, _CODA, _STATE = (2**30 + n for n in range(3))


class Model(nnx.Module):
  """Prelude, core and coda."""

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
    precision = PRECISIONS[config.precision]
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    if config.num_prelude:
      self.prelude = causal.layers(config, config.num_prelude, options, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
    if config.num_coda:
      self.coda = causal.layers(config, config.num_coda, options, rngs)
    if config.prelude_norm:
      self.prelude_norm = causal.final_norm(config, rngs)
    self.injection = injection.make(
      config.injection,
      config.width,
      nnx.initializers.normal(config.init_std),
      precision=precision,
      rngs=rngs,
    )
    if config.update == "gate":
      share = jnp.zeros(config.width, precision.params)
      self.update_share = nnx.Param(share)
    self.final_norm = causal.final_norm(config, rngs)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: PartsCache | None = None,
    valid: Array | None = None,
    keys: Array | None = None,
    depth: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" h_1 .. h_K f32 [K, B, T, D];
        "prediction", argmax of the read-out after every loop, by a coda of its
        own, i32 [K, B, T]; "confidence", its probability, f32 [K, B, T].
      depth: loops of this training step, i32 scalar or [B], instead of
        `num_loops`; without traces and without a cache.
    """
    call = begin(self, inputs, num_loops, kind, documents, cache, valid, keys)
    injected, state, cache = self.start(call, inputs, cache)
    if depth is not None:
      hidden = self.run_depth(call, injected, state, depth)
      output, _ = self.finish(call, hidden, None)
      return output

    def step(carry: Any, k: Array) -> tuple[Any, Any]:
      hidden, of_core = self.loop(call, injected, carry, k)  # h_k = R(e, h)
      stats = self.stats(carry[0], hidden)
      traces = {"hidden": hidden}
      if {"prediction", "confidence"} & {*trace}:
        read_out, _ = self.finish(call, hidden, cache)
        traces |= linear.prediction_and_confidence(read_out.logits)
      return (hidden, of_core), (stats, {name: traces[name] for name in trace})

    first: Any = state, None if cache is None else cache.core
    (hidden, core), records, steps_run = driver.run_loop(
      step, first, call.num_loops, kind=call.kind
    )
    after = None if cache is None else cache._replace(core=core)
    output, after = self.finish(call, hidden, after)
    loops, traces = records
    loops_run = jnp.full(len(inputs), steps_run, jnp.float32)
    return output._replace(
      stats={"loops_run": loops_run}, loops=loops, trace=traces, cache=after
    )

  def start(
    self, call: causal.Call, inputs: Array, cache: PartsCache | None
  ) -> tuple[Array, Array, PartsCache | None]:
    """The prelude's output e, the state h_0, [B, T, D] each, and the cache."""
    config = self.config
    embedded = config.input_scale * self.token_embedding(inputs)
    hidden = dropout(embedded, config.dropout, fold_in(call.keys, 0))
    injected, of_prelude = self.part(call, "prelude", hidden, cache)
    if config.prelude_norm:
      injected = self.prelude_norm(injected)
    if config.state == "input":
      state = injected
    elif config.state == "zero":
      state = jnp.zeros_like(injected)
    else:
      draws = _draws(call, injected.shape, cache)
      state = config.state_std * draws.astype(injected.dtype)
    return injected, state, cache and cache._replace(prelude=of_prelude)

  def loop(
    self, call: causal.Call, injected: Array, carry: Any, k: Array
  ) -> tuple[Array, Any]:
    """One loop: injection, core, norm and update of the state.

    Args:
      call: from `begin`.
      injected: e, [B, T, D].
      carry: the state h_{k-1} [B, T, D], and the core's cache or None.
      k: the loop's index, from 0.
    """
    config, (hidden, cache) = self.config, carry
    new, cache = stack.run_layers(
      self.layers,
      self.injection(hidden, injected),
      cache,
      call.metadata,
      first_slot=k * config.num_layers,
      keys=fold_in(call.keys, k + 1),
      unroll=call.kind == "unroll",
      remat=self.options.remat,
    )
    if config.update == "gate":
      share = jnp.where(k > 0, self.update_share[...], 1.0).astype(new.dtype)
      new = hidden + share[None, None] * (new - hidden)
    elif config.update == "damped":
      new = hidden + (new - hidden) / call.num_loops
    if config.exit_norm == "plain":
      new = norm.rms_normalise(new, _EPSILON).astype(new.dtype)
    elif config.exit_norm == "per_loop":
      new = self.final_norm(new)
    if config.injection == "anchor":
      new = new + config.anchor_scale * injected
    return sharding.split_by_example(new), cache

  def run_depth(
    self, call: causal.Call, injected: Array, state: Array, depth: Array
  ) -> Array:
    """The state after `depth` loops, of which the last b have a gradient."""
    graphdef, params = nnx.split(self)

    def step(shared: Any, hidden: Array, k: Array) -> Array:
      params, injected = shared
      model: Any = nnx.merge(graphdef, params)
      return model.loop(call, injected, (hidden, None), k)[0]

    last = self.config.num_with_gradient or len(self.config.depths())
    return depth_lib.run(step, (params, injected), state, depth, last)

  def finish(
    self, call: causal.Call, hidden: Array, cache: PartsCache | None
  ) -> tuple[Output, PartsCache | None]:
    """The coda and the read-out of the last state [B, T, D]."""
    if self.config.exit_norm == "coda":
      hidden = self.final_norm(hidden)
    hidden, of_coda = self.part(call, "coda", hidden, cache)
    if cache is not None:
      cache = cache._replace(coda=of_coda).extended(call.metadata.places)
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={},
      loops={},
      trace={},
      hidden=self.readout_input(hidden),
    ), cache

  def readout_input(self, hidden: Array) -> Array:
    """The coda's output [B, T, D] after its norm."""
    config = self.config
    if config.exit_norm == "per_loop" and not config.num_coda:
      return hidden  # The loop ends with the norm.
    return self.final_norm(hidden)

  def part(
    self,
    call: causal.Call,
    name: str,
    hidden: Array,
    cache: PartsCache | None,
  ) -> tuple[Array, Any]:
    """Applies "prelude" or "coda", which may have no layers."""
    layers, own = getattr(self, name, None), cache and getattr(cache, name)
    if layers is None:
      return hidden, own
    keys = fold_in(call.keys, {"prelude": _PRELUDE, "coda": _CODA}[name])
    return stack.run_layers(
      layers,
      hidden,
      own,
      call.metadata,
      keys=keys,
      unroll=call.kind == "unroll",
      remat=self.options.remat,
    )

  def stats(self, before: Array, after: Array) -> dict[str, Array]:
    """Means over tokens of |h|, of the relative change, and of correlation.

    "token_correlation" is the mean cosine of a row's states with their mean; 1
    means that all tokens have one state (Huginn, section 4.3).
    """
    change = jnp.linalg.norm(after - before, axis=-1)
    size = jnp.linalg.norm(after, axis=-1)
    middle = jnp.mean(after, axis=1, keepdims=True)
    along = jnp.sum(after * middle, axis=-1)
    far = size * jnp.linalg.norm(middle, axis=-1)
    return {
      "hidden_norm": norm.mean_norm(after),
      "relative_change": jnp.mean(change / (size + _EPSILON)),
      "token_correlation": jnp.mean(along / (far + _EPSILON)),
    }


def begin(
  model: Any,
  inputs: Array,
  num_loops: int | None = None,
  kind: str | None = None,
  documents: Array | None = None,
  cache: PartsCache | None = None,
  valid: Array | None = None,
  keys: Array | None = None,
) -> causal.Call:
  """`causal.begin` with the cache of the core."""
  core: Any = cache and cache.core
  return causal.begin(
    model, inputs, num_loops, kind, documents, core, valid, keys
  )


def _draws(
  call: causal.Call, shape: tuple[int, ...], cache: PartsCache | None
) -> Array:
  """Standard normal draws [B, T, D], cut at 3; of the row and the position."""
  batch, length, width = shape
  positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
  if cache is not None:
    positions = cache.core.positions(call.metadata.places)
  keys = fold_in(call.keys, _STATE)
  if keys is None:  # Evaluation: the same in every row.
    keys = jnp.broadcast_to(jax.random.key(0), (batch,))

  def of_token(key: Array, position: Array) -> Array:
    key = jax.random.fold_in(key, position)
    return jax.random.truncated_normal(key, -3.0, 3.0, (width,))

  of_row = jax.vmap(of_token, (None, 0))
  return jax.vmap(of_row)(keys, positions)
