"""Incremental reading of a model with recurrent depth, with early exits."""

from typing import Any

import jax.numpy as jnp

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import exits
from loopjax.models import causal, exiting, reading
from loopjax.models.recurrent.model import Model
from loopjax.nn.attention import parts
from loopjax.nn.attention.parts import PartsCache
from loopjax.types import PRECISIONS, Array, Output


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> PartsCache:
  """See `Reading.empty_cache`; `kind` is one of `parts.KINDS`."""
  config = model.config
  num_loops = checks.num_loops(config, num_loops)
  config.check_loops(num_loops)
  return parts.empty(
    config.block_shape(),
    (config.num_prelude, config.num_layers, config.num_coda),
    batch,
    max_tokens,
    PRECISIONS[config.precision],
    num_loops=num_loops,
    kind=kind or parts.KINDS[0],
  )


def reads_out_every_loop(config: Any) -> bool:
  """A damped loop depends on how many there are."""
  return config.update != "damped"


def check_exits(config: Any, rule: str, kept: str, kind: str) -> None:
  """See `Exits.check`: there is no gate, and the core has an injected input."""
  if rule != "fixed" and config.update == "damped":
    raise UserError(
      f"the exit rule {rule!r} is unsupported with model.update='damped': a"
      " loop depends on how many follow"
    )
  exiting.check_ungated(config, rule, kept, kind)


def unstacked(model: Model) -> Model:
  """See `Reading.unstacked`; loops add their differences to a stacked core."""
  core = model.layers
  model = reading.unstacked(model)
  if model.config.relaxed_rank:
    model.layers = core
  return model


def read(
  model: Model,
  tokens: Array,
  cache: PartsCache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
) -> tuple[Output, PartsCache]:
  """`Reading.read` with early exits, as `exiting.read`.

  A read-out in the loop runs the coda, which writes the token's keys and values
  anew each time; the last ones belong to the loop that is decoded.
  """
  num_loops = checks.num_loops(model.config, num_loops)
  if exit_policy is None:
    return reading.read(model, tokens, cache, num_loops=num_loops, valid=valid)
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  core: Any = cache.core
  call = causal.begin(model, tokens, num_loops, "scan", cache=core, valid=valid)
  # What damping divides by: the loops of each row.
  max_loops: Any = jnp.minimum(exit_policy.num_loops, num_loops)
  call = call._replace(num_loops=max_loops)
  metadata, out_of_range = call.metadata, cache.capacity
  injected, state, started = model.start(call, tokens, cache)
  assert started is not None

  def live_call(live: Array) -> causal.Call:
    places = jnp.where(live[:, None], metadata.places, out_of_range)
    return call._replace(metadata=metadata._replace(places=places))

  def step(hidden: Array, cached: Any, k: Array, live: Array) -> Any:
    core, coda = cached
    hidden, core = model.loop(live_call(live), injected, (hidden, core), k)
    return hidden, (core, coda)

  def read_out(hidden: Array, cached: Any, live: Array) -> Any:
    core, coda = cached
    read_cache = started._replace(coda=coda)
    hidden, coda = model.after_loops(live_call(live), hidden, read_cache)
    return model.logits(hidden[:, -1]), (core, coda)

  rule = exit_policy.rule if tokens.shape[1] == 1 else "fixed"
  hidden, (core, coda), loops = exiting.run(
    model,
    exit_policy,
    rule,
    step,
    (state, (started.core, started.coda)),
    jnp.any(valid, axis=1),
    num_loops,
    read_out,
  )
  if exit_policy.skips(rule):
    core = core.with_skipped(num_loops, loops, metadata.places, None)
  finished = started._replace(core=core, coda=coda)
  output, new_cache = model.finish(call, hidden, finished)
  assert new_cache is not None
  stats = {"loops_run": loops.astype(jnp.float32)}
  return output._replace(stats=stats), new_cache
