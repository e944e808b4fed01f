"""Incremental reading of a model with recurrent depth, with early exits."""

from typing import Any

import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.loop import exits
from loopjax.models import causal, exiting
from loopjax.models.exiting import check_resumes as check_resumes
from loopjax.models.recurrent.model import Model
from loopjax.nn import stack
from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention import parts
from loopjax.nn.attention.parts import PartsCache
from loopjax.types import PRECISIONS, Array, Output

CACHES = cache_lib.KINDS
_RULES = ("fixed", "change")


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
  prompt_tokens: int = 0,
) -> PartsCache:
  """See `CausalFamily.empty_cache`; `kind` is one of `nn.cache.KINDS`."""
  config = model.config
  return parts.empty(
    config.block_shape(),
    (config.num_prelude, config.num_layers, config.num_coda),
    batch,
    max_tokens,
    PRECISIONS[config.precision],
    num_loops=config.num_loops if num_loops is None else num_loops,
    kind=kind or CACHES[0],
    prompt_tokens=prompt_tokens,
  )


def exit_rule(config: Any) -> str:
  """See `ExitsEarly`: without another choice, all loops run."""
  del config
  return "fixed"


def reads_out_every_loop(config: Any) -> bool:
  """See `ReadsOutEveryLoop`: a damped loop depends on how many there are."""
  return config.update != "damped"


def check_exits(config: Any, rule: str, kept: str, kind: str) -> None:
  """See `ExitsEarly`: rules that need no read-out, which is the coda's."""
  del config, kind
  if rule not in _RULES:
    raise UserError(
      f"the exit rule {rule!r} needs a read-out after every loop, and this"
      f" model reads out after its coda; there are {', '.join(_RULES)}"
    )
  if kept == "state":
    raise UserError(
      "keeping 'state' for skipped loops needs keys and values of the last"
      " state, and the core of this model reads an injected input as well"
    )


def read(
  model: Model,
  tokens: Array,
  cache: PartsCache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
  resumed: exits.Resumed | None = None,
) -> tuple[Output, PartsCache]:
  """`CausalFamily.read` with early exits, as `exiting.read`."""
  num_loops = model.config.num_loops if num_loops is None else num_loops
  if exit_policy is None:
    output = model(
      tokens, num_loops=num_loops, kind="scan", cache=cache, valid=valid
    )
    return output._replace(cache=None), output.cache
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  core: Any = cache.core
  call = causal.begin(model, tokens, num_loops, "scan", cache=core, valid=valid)
  metadata, nowhere = call.metadata, cache.capacity
  injected, state, found = model.start(call, tokens, cache)
  assert found is not None
  begun = resumed.num_loops if resumed else 0

  def step(hidden: Array, core: Any, k: Array, live: Array) -> Any:
    places = jnp.where(live[:, None], metadata.places, nowhere)
    here = call._replace(metadata=metadata._replace(places=places))
    return model.loop(here, injected, (hidden, core), k)

  rule = exit_policy.rule if tokens.shape[1] == 1 else "fixed"
  hidden, core, loops = exiting.run(
    model,
    exit_policy,
    rule,
    step,
    (resumed.state if resumed else state, found.core),
    jnp.any(valid, axis=1),
    num_loops,
    begun,
  )
  if rule != "fixed" and exit_policy.kept != "computed":
    core = core.with_skipped(num_loops, loops, metadata.places, None)
  output, after = model.finish(call, hidden, found._replace(core=core))
  assert after is not None
  stats = {"loops_run": loops.astype(jnp.float32)}
  return output._replace(stats=stats, trace={"state": hidden}), after


def unstacked(model: Any) -> Any:
  """See `StacksLayers.unstacked` and `nn.stack.unstacked`."""
  for name in ("prelude", "layers", "coda"):
    if hasattr(model, name):
      setattr(model, name, stack.unstacked(getattr(model, name)))
  return model
