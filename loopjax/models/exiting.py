"""Prefill and decode with early exits, for models that loop over a stack."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.models import causal, reading
from loopjax.nn import stack
from loopjax.nn.attention.cache import Cache
from loopjax.types import Array, Output

ReadOut = Callable[[Array, Any, Array], tuple[Array, Any]]
Between = Callable[[Array], Array]


def exit_rule(config: Any) -> str:
  """See `Exits.rule`: "gate" with an exit gate, otherwise "fixed"."""
  return "fixed" if config.exit_gate == "none" else "gate"


def untrained(config: Any) -> str:
  """See `Family.untrained`: the gate, or everything else."""
  patterns = {"unused": "^exit_gate/", "alone": "^(?!exit_gate/)"}
  return patterns.get(config.exit_gate, "")


def check_exits(config: Any, rule: str, kept: str, kind: str) -> None:
  """Raises UserError for exits that the model or its cache does not support."""
  if rule == "gate" and config.exit_gate == "none":
    raise UserError(
      "the exit rule 'gate' needs a model with an exit gate, but"
      " model.exit_gate='none'"
    )
  if kept == "state" and kind != "per_loop":
    raise UserError(
      f"exit_kept='state' needs cache_kind='per_loop', got {kind!r}"
    )


def check_ungated(config: Any, rule: str, kept: str, kind: str) -> None:
  """See `Exits.check`, without a gate, where loops read more than the state."""
  del config, kind
  if rule == "gate":
    raise UserError(
      "the exit rule 'gate' needs an exit gate, which this model lacks"
    )
  if kept == "state":
    raise UserError(
      "exit_kept='state' is unsupported: a loop of this model uses more than"
      " the last state"
    )


def read(
  model: Any,
  tokens: Array,
  cache: Cache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
  between: Between | None = None,
) -> tuple[Output, Cache]:
  """`Reading.read` with early exits; without them if there is no policy.

  `between`, if there is one, computes the input of each loop after the first
  from the state after the previous loop, [B, S, D].

  The loop ends when all rows have exited. If rows have several tokens, which
  are parts of prompts, they run up to `exit_policy.num_loops` loops without an
  early exit; later tokens may run more if it `fills`. The output's "loops_run"
  is the number of loops after which each row exited.
  """
  num_loops = checks.num_loops(model.config, num_loops)
  if exit_policy is None:
    return reading.read(model, tokens, cache, num_loops=num_loops, valid=valid)
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  call = causal.begin(
    model, tokens, num_loops, "scan", cache=cache, valid=valid
  )
  metadata, out_of_range = call.metadata, cache.capacity

  def step(hidden: Array, cache: Any, k: Array, live: Array) -> Any:
    # Rows that have exited write nothing: later loops may share their keys.
    places = jnp.where(live[:, None], metadata.places, out_of_range)
    live_call = call._replace(metadata=metadata._replace(places=places))
    if between is not None:
      hidden = jax.lax.cond(k > 0, between, lambda first: first, hidden)
    return model.transform(live_call, (hidden, cache), k)

  rule = exit_policy.rule if tokens.shape[1] == 1 else "fixed"
  reads = jnp.any(valid, axis=1)
  start = model.embed(tokens, None)
  hidden, cache, loops = run(
    model, exit_policy, rule, step, (start, cache), reads, num_loops
  )
  if exit_policy.skips(rule):
    key_values = None
    if exit_policy.kept == "state":
      key_values = stack.keys_and_values(model.layers, hidden, metadata)
    cache = cache.with_skipped(num_loops, loops, metadata.places, key_values)
  output = Output(
    logits=model.logits(hidden),
    losses={},
    stats={"loops_run": loops.astype(jnp.float32)},
    loops={},
    trace={},
    hidden=model.readout_input(hidden),
  )
  return output, cache.extended(metadata.places)


def run(
  model: Any,
  exit_policy: exits.ExitPolicy,
  rule: str,
  step: Callable[[Array, Any, Array, Array], tuple[Array, Any]],
  start: tuple[Array, Any],
  reads: Array,
  num_loops: int,
  read_out: ReadOut | None = None,
) -> tuple[Array, Any, Array]:
  """Runs loops until all rows have exited.

  Args:
    model: computes the exit gate, if `rule` needs it.
    exit_policy: when rows exit.
    rule: the rule to apply, `exit_policy.rule` or "fixed".
    step: (hidden [B, S, D], cached, loop, live) -> (hidden, cached) after the
      loop. `live`, bool [B], marks the rows that run it; what later tokens read
      of the other rows must not change, and their hidden states are ignored.
    start: (hidden, cached) before the first loop. `cached` is any pytree.
    reads: bool [B], rows that read tokens.
    num_loops: K, the maximum.
    read_out: (hidden [B, S, D] after a loop, cached, live) -> (logits of the
      last token [B, V], cached); called in every loop if `rule` needs it. The
      model's `logits` if None.

  Returns:
    The hidden state of each row after its last loop, `cached`, and the number
    of loops of each row, i32 [B].
  """

  computed = exit_policy.kept == "computed"

  def loop(carry: Any, k: Array) -> tuple[Any, None]:
    hidden, final, cached, state, history = carry
    live = state.live
    new, cached = step(hidden, cached, k, live | computed)
    final = jnp.where(live[:, None, None], new, final)
    evidence = _evidence(model, rule, hidden[:, -1], new[:, -1])
    if rule in exits.READ_OUT:
      if read_out is None:
        logits = model.logits(new[:, -1])
      else:
        logits, cached = read_out(new, cached, live | computed)
      evidence, history = exits.read_out_evidence(
        rule, history, logits, model.spec.num_padding_tokens
      )
    state = exits.after_loop(exit_policy, rule, state, evidence)
    return (new if computed else final, final, cached, state, history), None

  hidden, cached = start
  history = exits.no_read_outs(rule, len(hidden), model.spec.vocab_size)
  (_, hidden, cached, state, _), _, _ = driver.run_loop(
    loop,
    (hidden, hidden, cached, exits.start(reads), history),
    num_loops,
    kind="scan" if computed else "while",
    done_fn=lambda carry: ~jnp.any(carry[3].live),
  )
  return hidden, cached, state.loops


def _evidence(model: Any, rule: str, before: Array, after: Array) -> Array:
  """What rules compare that need no read-out, f32 [B], of states [B, D]."""
  if rule == "gate":
    return model.exit_logits(after)
  if rule == "change":
    return exits.relative_change(before, after)
  return jnp.zeros(len(after))
