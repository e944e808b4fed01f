"""Reading with exits, for families whose loop is the whole stack."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.models import causal, reading
from loopjax.nn import stack
from loopjax.nn.cache import Cache
from loopjax.types import Array, Output


def own_rule(config: Any) -> str:
  """The gate, where there is one."""
  return "fixed" if config.exit_gate == "none" else "gate"


def check_exits(config: Any, rule: str, kept: str, kind: str) -> None:
  """Raises UserError for exits that the model or its cache does not have."""
  if rule == "gate" and config.exit_gate == "none":
    raise UserError(
      "exits by the gate need a model that has one: model.exit_gate is 'none'"
    )
  if kept == "state" and kind != "per_loop":
    raise UserError(
      f"a cache of kind {kind!r} keeps nothing of single loops, so what is kept"
      " of skipped ones cannot be 'state'"
    )


def read(
  model: Any,
  tokens: Array,
  cache: Cache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  leave: exits.Exits | None = None,
) -> tuple[Output, Cache]:
  """Reads on; every row leaves the loop as `leave` says, or none does.

  The loop ends when all rows have left it. Rows of several tokens are parts of
  prompts, which run all the loops that they may. The output's "loops_run" are
  the loops after which a row is read out.
  """
  num_loops = model.config.num_loops if num_loops is None else num_loops
  if leave is None:
    return reading.read(model, tokens, cache, num_loops=num_loops, valid=valid)
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  call = causal.begin(
    model, tokens, num_loops, "scan", cache=cache, valid=valid
  )
  metadata, nowhere = call.metadata, cache.room

  def step(hidden: Array, cache: Any, k: Array, live: Array) -> Any:
    # What has left writes nothing, whose keys later loops would share.
    places = jnp.where(live[:, None], metadata.places, nowhere)
    here = call._replace(metadata=metadata._replace(places=places))
    return model.transform(here, (hidden, cache), k)

  rule = leave.rule if tokens.shape[1] == 1 else "fixed"
  there = jnp.any(valid, axis=1)
  start = model.embed(tokens, None), cache
  hidden, cache, loops = run(model, leave, rule, step, start, there, num_loops)
  if rule != "fixed" and leave.kept != "computed":
    own = None
    if leave.kept == "state":
      own = stack.kept_of(model.layers, hidden, metadata)
    cache = cache.with_skipped(num_loops, loops, metadata.places, own)
  output = Output(
    logits=model.logits(hidden),
    losses={},
    stats={"loops_run": loops.astype(jnp.float32)},
    loops={},
    trace={},
    hidden=model.normed(hidden),
  )
  return output, cache.longer(metadata.places)


def run(
  model: Any,
  leave: exits.Exits,
  rule: str,
  step: Callable[[Array, Any, Array, Array], tuple[Array, Any]],
  start: tuple[Array, Any],
  there: Array,
  num_loops: int,
) -> tuple[Array, Any, Array]:
  """Loops until all rows have left; what a row skips is not run for it.

  Args:
    model: reads states out, for the evidence of a rule.
    leave: when rows leave.
    rule: that is in force, that of `leave` or "fixed".
    step: (hidden [B, S, D], kept, loop, live) -> both after the loop. It keeps
      nothing of rows that are not live, bool [B]; what it returns of their
      states does not matter.
    start: hidden and kept, before the first loop.
    there: bool [B], rows that read tokens.
    num_loops: K, the most.

  Returns:
    Each row's state after its last loop, what is kept, and loops, i32 [B].
  """
  computed = leave.kept == "computed"

  def loop(carry: Any, k: Array) -> tuple[Any, None]:
    hidden, chosen, kept, running = carry
    live = running.live
    new, kept = step(hidden, kept, k, live | computed)
    chosen = jnp.where(live[:, None, None], new, chosen)
    evidence = _evidence(model, rule, hidden[:, -1], new[:, -1])
    running = exits.after_loop(leave, rule, running, evidence)
    return (new if computed else chosen, chosen, kept, running), None

  hidden, kept = start
  (_, hidden, kept, running), _, _ = driver.run_loop(
    loop,
    (hidden, hidden, kept, exits.start(there)),
    num_loops,
    kind="scan" if computed else "while",
    done_fn=lambda carry: ~jnp.any(carry[3].live),
  )
  return hidden, kept, running.loops


def _evidence(model: Any, rule: str, before: Array, after: Array) -> Array:
  """What a loop is judged by, f32 [B], of the states [B, D] around it."""
  if rule == "gate":
    return model.exit_logits(after)
  if rule == "change":
    return exits.relative_change(before, after)
  if rule == "entropy":
    return exits.relative_entropy(model.logits(after))
  return jnp.zeros(len(after))
