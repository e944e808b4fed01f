"""Recurrent depth: a prelude, a core that is applied K times, and a coda.

Sources: Huginn (arXiv 2502.05171, section 3): e = P(x), h_0 random,
h_k = R(e, h_{k-1}), logits = C(h_K); training with a random number of loops and
gradients through the last ones. Parcae (arXiv 2604.12946), the boundary
operator (arXiv 2609.19107) and LoopLM are other settings of it.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from loopjax import sharding
from loopjax.loop import depth as depth_lib
from loopjax.loop import driver, injection, relaxed
from loopjax.models import causal, every_loop
from loopjax.models.recurrent.config import Config
from loopjax.nn import attention, norm, stack
from loopjax.nn.attention.parts import PartsCache
from loopjax.nn.keys import dropout, fold_in, normal_by_token
from loopjax.types import PRECISIONS, Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence", "relative_change")
_EPSILON = 1e-6  # Of the norms without a gain.
# Folded into random keys; dropout in the loops has 1, 2, ...
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
    if config.relaxed_rank:
      _, shared = nnx.split(self.layers)
      self.differences = relaxed.Differences(
        nnx.to_pure_dict(shared),
        config.num_loops,
        config.relaxed_rank,
        rngs.params(),
      )
    if config.num_coda:
      self.coda = causal.layers(config, config.num_coda, options, rngs)
    if config.prelude_norm:
      self.prelude_norm = causal.final_norm(config, rngs)
    self.injection = injection.INJECTIONS[config.injection].make(
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
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: PartsCache | None = None,
    valid: Array | None = None,
    keys: Array | None = None,
    depth: Array | None = None,
    targets: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" h_1 .. h_K f32 [K, B, T, D];
        "prediction", argmax of the read-out after every loop, by a coda of its
        own, i32 [K, B, T]; "confidence", its probability, f32 [K, B, T];
        "relative_change" of the state, f32 [K, B], see `every_loop.state`.
      depth: loops of this training step, i32 scalar or [B], instead of
        `num_loops`; without traces and without a cache.
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, by a coda of its own, [K, B, ...].
    """
    core_cache: Any = cache and cache.core
    if num_loops is not None:
      self.config.check_loops(num_loops)
    call = causal.begin(
      self, inputs, num_loops, kind, documents, core_cache, valid, keys
    )
    injected, state, cache = self.start(call, inputs, cache)
    if depth is not None:
      hidden = self.run_depth(call, injected, state, depth)
      output, _ = self.finish(call, hidden, None)
      return output

    def step(carry: Any, k: Array) -> tuple[Any, Any]:
      hidden, core_cache = self.loop(call, injected, carry, k)  # h_k = R(e, h)
      states = every_loop.state(carry[0], hidden)
      return (hidden, core_cache), every_loop.record(
        self, trace, {name: jnp.mean(x) for name, x in states.items()},
        before=carry[0], targets=targets, hidden=hidden,
        read_out=lambda hidden: self.finish(call, hidden, cache)[0].hidden,
      )  # fmt: skip

    first = state, core_cache
    (hidden, new_core), records, steps_run = driver.run_loop(
      step, first, call.num_loops, kind=call.kind, part=causal.STATE
    )
    new_cache = None if cache is None else cache._replace(core=new_core)
    output, new_cache = self.finish(call, hidden, new_cache)
    loops, traces = records
    loops_run = jnp.full(len(inputs), steps_run, jnp.float32)
    return output._replace(
      stats={"loops_run": loops_run}, loops=loops, trace=traces, cache=new_cache
    )

  def start(
    self, call: causal.Call, inputs: Array, cache: PartsCache | None
  ) -> tuple[Array, Array, PartsCache | None]:
    """The prelude's output e, the state h_0, [B, T, D] each, and the cache."""
    config = self.config
    embedded = config.input_scale * self.token_embedding(inputs)
    hidden = dropout(embedded, config.dropout, fold_in(call.keys, 0))
    injected, prelude_cache = self.part(call, "prelude", hidden, cache)
    if config.prelude_norm:
      injected = self.prelude_norm(injected)
    if config.state == "input":
      state = injected
    elif config.state == "zero":
      state = jnp.zeros_like(injected)
    else:
      assert config.state == "normal", config.state
      documents = call.metadata.documents
      if cache is not None:
        positions = call.metadata.places
      elif documents is not None and call.keys is None:
        positions = attention.places_in(documents)
      else:  # In training, documents of a row have different states.
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
      keys = fold_in(call.keys, _STATE)
      draws = normal_by_token(keys, positions, config.width)
      state = config.state_std * draws.astype(injected.dtype)
    if cache is not None and inputs.shape[1] == 1:
      state = cache.first_state(state, call.metadata.places)
    return injected, state, cache and cache._replace(prelude=prelude_cache)

  def loop(
    self, call: causal.Call, injected: Array, carry: Any, k: Array
  ) -> tuple[Array, Any]:
    """One loop: injection, core, norm and update of the state.

    Args:
      call: from `begin`.
      injected: e, [B, T, D].
      carry: the state h_{k-1} [B, T, D], and the core's cache or None.
      k: the loop's index, from 0; i32 scalar, or [B] without a cache.
    """
    config, (hidden, cache) = self.config, carry
    layers: Any = self.layers
    if config.relaxed_rank:
      layers = relaxed.layers_of_loop(layers, self.differences, k)
      if cache is not None and cache.is_unstacked:
        layers = stack.unstacked(layers)
    new, cache = stack.run_layers(
      layers,
      self.injection(hidden, injected),
      cache,
      call.metadata,
      first_slot=k * config.num_layers,
      keys=fold_in(call.keys, k + 1),
      unroll=call.kind == "unroll",
      remat=self.options.remat,
    )
    if config.update == "gate":
      share = jnp.where(by_row(k) > 0, self.update_share[...][None, None], 1.0)
      new = hidden + share.astype(new.dtype) * (new - hidden)
    elif config.update == "damped":
      new = hidden + (new - hidden) / by_row(call.num_loops).astype(new.dtype)
    if config.loop_norm == "plain":
      new = norm.rms_normalise(new, _EPSILON).astype(new.dtype)
    elif config.loop_norm == "per_loop":
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
      return model.loop(depth_call, injected, (hidden, None), k)[0]

    depth_call: Any = call  # Damping divides by the number of loops.
    depth_call = depth_call._replace(num_loops=depth)
    config = self.config
    max_loops = max(len(config.depths()), *config.growth_loops, 0)
    arguments = step, (params, injected), state, depth
    if last := config.num_with_gradient:
      return depth_lib.run(*arguments, min(last, max_loops))
    # A growing depth has few loops, of which all are run in the end.
    is_random = config.depth != "fixed"
    return depth_lib.run_all(*arguments, max_loops, remat=is_random)

  def finish(
    self, call: causal.Call, hidden: Array, cache: PartsCache | None
  ) -> tuple[Output, PartsCache | None]:
    """The coda and the read-out of the last state [B, T, D]."""
    state = hidden
    hidden, coda_cache = self.after_loops(call, hidden, cache)
    if cache is not None:
      cache = cache._replace(coda=coda_cache)
      cache = cache.extended(call.metadata.places, state)
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={},
      loops={},
      trace={},
      hidden=self.readout_input(hidden),
    ), cache

  def after_loops(
    self, call: causal.Call, hidden: Array, cache: PartsCache | None
  ) -> tuple[Array, Any]:
    """The coda's output [B, T, D] for a state, and its cache."""
    if self.config.loop_norm == "coda":
      hidden = self.final_norm(hidden)
    return self.part(call, "coda", hidden, cache)

  def readout_input(self, hidden: Array) -> Array:
    """The coda's output [B, T, D] after its norm."""
    config = self.config
    if config.loop_norm == "per_loop" and not config.num_coda:
      return hidden  # The loop ends with the norm.
    return self.final_norm(hidden)

  def part(
    self, call: causal.Call, name: str, hidden: Array, cache: PartsCache | None
  ) -> tuple[Array, Any]:
    """Applies "prelude" or "coda", which may have no layers."""
    layers, part_cache = (
      getattr(self, name, None),
      cache and getattr(cache, name),
    )
    if layers is None:
      return hidden, part_cache
    keys = fold_in(call.keys, {"prelude": _PRELUDE, "coda": _CODA}[name])
    return stack.run_layers(
      layers,
      hidden,
      part_cache,
      call.metadata,
      keys=keys,
      unroll=call.kind == "unroll",
      remat=self.options.remat,
    )

  def measures(self) -> dict[str, Array]:
    """See `Family.measures`: "injection_radius", how a loop maps the state."""
    radius = injection.INJECTIONS[self.config.injection].radius
    return {"injection_radius": radius(self.injection)} if radius else {}


def by_row(number: Array | int) -> Array:
  """A scalar or numbers of rows [B] as [1 or B, 1, 1]."""
  return jnp.reshape(jnp.asarray(number), (-1, 1, 1))
