"""Sleep: passes that write a window into fast weights before it is evicted.

Source: "Language Models Need Sleep" (arXiv 2605.26099). Attention is limited to
one window. Information for later windows must be in the fast weights S of the
memory layers. N passes over the window write them ("sleep"); the answer is read
in one pass ("awake"). By the lines of algorithm 1:

  1       S = 0                            `Model.empty_state`
  2, 3    windows, and the last chunk      `split`
  4       h <- Embed(c)                    `Model.embed`
  5       sleep, if no token is predicted  `split`: all chunks but the last, by
                                           the number of answer tokens
  6 to 8  N times h, S <- Blocks(h, S)     `Model.sleep`, `Model.next_input`
  10      once h, S <- Blocks(h, S)        `Model.awake`
  11      the loss                         `loss`
  14      its gradient                     through all windows, by autodiff

Gradients reach earlier windows through S, the kept keys and values and, if they
are carried, the convolutions' inputs. If every token is predicted, a window is
predicted in its first pass and sleeps too. `run_passes` says which of the
passes have a gradient, `cut` where it ends. `reading.py` runs the same passes
on keys and values in a cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver, windows
from loopjax.losses import tokens as token_losses
from loopjax.models import causal
from loopjax.models.sleep.config import Config, last_chunk
from loopjax.nn import hybrid, remat, rope, stack
from loopjax.nn.attention.cache import KeyValues
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.protocols import AnyTeacher
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)

TRACES = ("hidden",)
Carry = tuple[Array, hybrid.Memory]  # h and S of a pass.


def _read_state(carry: Carry) -> dict[str, Array]:
  """h [B, L, D] and S [B, groups, layers, H, d_k, d_v]."""
  hidden, memory = carry
  fast = jnp.moveaxis(memory.state.fast, 2, 0)
  return {"hidden": hidden, "fast_weights": fast}


def _write_state(carry: Carry, state: dict[str, Array]) -> Carry:
  memory, fast = carry[1], jnp.moveaxis(state["fast_weights"], 0, 2)
  layers = memory.state._replace(fast=fast)
  return state["hidden"], memory._replace(state=layers)


STATE = driver.Part(_read_state, _write_state)


class Tokens(NamedTuple):
  """Embedded tokens.

  Attributes:
    hidden: [..., D].
    mask: bool [...], False for padding; None without padding.
  """

  hidden: Array
  mask: Array | None = None


class WindowState(NamedTuple):
  """The state that a window passes to the next one.

  Attributes:
    parts: the memories of prelude, core and coda.
    past_mask: bool [B, P], False for padding among the P past tokens.
  """

  parts: tuple[hybrid.Memory, ...]
  past_mask: Array


class Model(nnx.Module):
  """Alternating attention and fast weights, with passes over windows."""

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
    checks.one_document(spec, "carries fast weights along a row")
    last_chunk(config, spec)  # Raises if the task does not fit the windows.
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
    self.memories = stack.stacked(
      config.num_memory_layers,
      rngs,
      hybrid.MemoryBlock,
      config.block_shape(),
      config.memory_shape(),
      kernels=KERNELS[options.kernels],
      precision=PRECISIONS[config.precision],
    )
    self.final_norm = causal.final_norm(config, rngs)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)
    if config.exit_gate != "none":
      self.exit_gate = causal.exit_gate(config, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Reads windows, sleeps over each, and predicts (algorithm 1).

    If the task has answer tokens, only these are predicted, in one pass over
    the tokens after the last whole window. Otherwise every token is predicted
    from the first pass over its window: from the second pass on, the fast
    weights contain later tokens.

    Args:
      inputs: token ids [B, T]; any T if every token is predicted. Padding may
        be anywhere: it takes up a place in its window but is masked.
      num_loops: N >= 1; may differ from the number in training.
      kind: how the passes are executed; as in the model's options if None.
      trace: "hidden": the residual stream after every pass over the windows,
        f32 [N, B, W L, D].

    Returns:
      An output with logits of the answer or of all tokens [B, A or T, V]; and
      loops, each [N]: "hidden_norm" and "fast_weight_norm" after every pass,
      and "retention/memory=i" of every memory layer that runs N times, the
      fraction of its fast weights that a pass retains. All are means over the
      non-padding tokens of a row's windows, then over rows.
    """
    num_passes = checks.num_loops(self.config, num_loops)
    kind = kind or self.options.execution
    slept, last = split(self.embed(inputs), self.config.window)

    def sleep(state: WindowState, item: Any) -> Any:
      number, window = item
      passes = driver.later(kind, number * num_passes)
      return self.sleep(state, window, num_passes, passes, trace)

    state, records = remat.scan(
      sleep,
      self.empty_state(
        len(inputs),
        num_past=self.config.num_past,
        carry_convolutions=self.config.carry_convolutions,
      ),
      (jnp.arange(len(slept.hidden)), slept),
      unroll=kind == "unroll",
    )
    hidden, _ = self.awake(state, last, kind)
    if self.spec.num_answer_tokens:
      hidden = windows.last(hidden, self.spec.num_answer_tokens)
    else:
      hidden = jnp.concatenate([windows.join(records.pop("awake")), hidden], 1)
    traces = checks.recorded(records, trace)
    records = {name: x for name, x in records.items() if name not in traces}
    states = traces.pop(driver.STATE, None)
    num_tokens = jnp.maximum(jnp.sum(records.pop("num_tokens"), axis=0), 1)
    if not len(slept.hidden):
      records = {}  # Without windows there is nothing to average.
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": jnp.full(len(inputs), num_passes, jnp.float32)},
      loops={
        name: jnp.mean(jnp.sum(x, axis=0) / num_tokens, axis=-1)
        for name, x in records.items()
      },
      trace={  # [W, N, B, L, D] -> [N, B, W L, D]
        name: jax.vmap(windows.join, 1)(value) for name, value in traces.items()
      }
      | ({} if states is None else driver.in_order(states)),
      hidden=self.readout_input(hidden),
    )

  def sleep(
    self,
    state: WindowState,
    tokens: Tokens,
    num_passes: int,
    kind: driver.Kind,
    trace: tuple[str, ...] = (),
  ) -> tuple[WindowState, dict[str, Array]]:
    """N passes over a window, and its eviction (algorithm 1, lines 6 to 8).

    Returns:
      (the state after the window, records of every pass [N, ...] by name). If
      every token is predicted, the records include "awake", the residual stream
      [B, L, D] of the first pass.
    """
    prelude, core, coda = self.parts()
    prelude_memory, core_memory, coda_memory = state.parts
    read = functools.partial(self._read, unroll=kind == "unroll")
    window = self._window(tokens, state.past_mask)
    inputs, new_prelude, _ = read(
      prelude, tokens.hidden, window, prelude_memory
    )

    def one_pass(carry: Carry, n: Array) -> tuple:
      hidden, memory = carry
      hidden, layer_states = self.next_input(
        n, hidden, memory.state, inputs, core_memory.state
      )
      memory = core_memory._replace(state=layer_states)
      hidden, memory, stats = read(core, hidden, window, memory)  # Line 7.
      record = _record(self.config, hidden, memory, stats, tokens.mask)
      return (hidden, memory), record | {name: hidden for name in trace}

    first_pass, (asleep, new_core), records = run_passes(
      self.config,
      one_pass,
      (inputs, core_memory),
      num_passes,
      kind,
      want_first=not self.spec.num_answer_tokens,
    )
    hidden, new_coda, _ = read(coda, asleep, window, coda_memory)
    if first_pass is not None:  # Predictions are made from the first pass.
      if num_passes > 1:
        hidden, _, _ = read(coda, first_pass[0], window, coda_memory)
      records["awake"] = hidden
    past_mask = windows.last(window.mask, self.config.num_past)
    parts = new_prelude, new_core, new_coda
    return WindowState(parts, past_mask), records

  def next_input(
    self,
    n: Array,
    hidden: Array,
    state: fast_weights.State,
    inputs: Array,
    start: fast_weights.State,
  ) -> tuple[Array, fast_weights.State]:
    """h and S that the core reads in a pass over a window (line 7).

    Args:
      n: index of the pass, from 0.
      hidden, state: the core's output [B, L, D], and its memory layers' states,
        after the pass before.
      inputs, start: its input in the first pass, and those states at the start
        of the window; also the convolutions of every pass begin with them.
    """
    config = self.config
    fast = state.fast if config.carry_state else start.fast
    next_input = hidden
    if config.loop_norm == "per_loop":
      next_input = self.final_norm(hidden)
    if config.injection == "add":
      next_input = next_input + inputs
    return jnp.where(n > 0, next_input, hidden), start._replace(fast=fast)

  def awake(
    self, state: WindowState, tokens: Tokens, kind: driver.Kind = "scan"
  ) -> tuple[Array, WindowState]:
    """Reads tokens in one pass: the answer (line 10), or the last tokens.

    Args:
      state: the state after the previous window.
      tokens: the tokens, hidden [B, S, D].
      kind: "unroll" compiles each layer separately.

    Returns:
      (the residual stream [B, S, D], the state after these tokens).
    """
    window = self._window(tokens, state.past_mask)
    hidden, memories = tokens.hidden, []
    read = functools.partial(self._read, unroll=kind == "unroll")
    for part, memory in zip(self.parts(), state.parts, strict=True):
      hidden, memory, _ = read(part, hidden, window, memory)
      memories.append(memory)
    past_mask = windows.last(window.mask, self.config.num_past)
    return hidden, WindowState(tuple(memories), past_mask)

  def readout_input(self, hidden: Array) -> Array:
    """The residual stream [B, S, D] after the final norm."""
    return self.final_norm(hidden)

  def parts(self) -> list[hybrid.Groups]:
    """Prelude, core and coda: the groups that run once, N times, and once.

    Prelude and coda may have no groups.
    """
    config, groups = self.config, hybrid.grouped(self.layers, self.memories)
    per_group = config.num_layers // config.num_groups
    first = config.num_prelude // per_group
    last = (config.num_layers - config.num_coda) // per_group
    return [
      jax.tree.map(lambda x, part=part: x[part], groups)
      for part in (slice(first), slice(first, last), slice(last, None))
    ]

  def empty_state(
    self, batch: int, *, num_past: int, carry_convolutions: bool
  ) -> WindowState:
    """The state before the first window.

    Args:
      batch: B.
      num_past: P, number of past tokens, which are masked.
      carry_convolutions: whether the convolutions' inputs are part of it.
    """
    parts = tuple(
      hybrid.empty_memory(
        part, batch, num_past, carry_convolutions=carry_convolutions
      )
      for part in self.parts()
    )
    return WindowState(parts, jnp.zeros((batch, num_past), bool))

  def embed(self, inputs: Array) -> Tokens:
    """Embeds token ids [B, S] and masks padding ids."""
    spec = self.spec
    mask = inputs < spec.num_tokens if spec.num_padding_tokens else None
    return Tokens(self.token_embedding(inputs), mask)

  def _window(self, tokens: Tokens, past_mask: Array) -> windows.Window:
    """Positions and masks of a window's tokens after P past tokens."""
    size = tokens.hidden.shape[1]
    return windows.make_window(past_mask, tokens.mask, size)

  def _read(
    self,
    part: hybrid.Groups,
    hidden: Array,
    window: windows.Window,
    memory: hybrid.Memory,
    *,
    unroll: bool = False,
  ) -> tuple[Array, hybrid.Memory, dict[str, Array]]:
    """Applies groups to a window; the memory keeps the last P tokens."""
    if not len(jax.tree.leaves(part)[0]):  # Nothing to trace.
      return hidden, memory, {}
    width, reach = self.layers.attention.head_width, self.config.window
    tables = rope.rope_tables(window.positions, width, self.config.rope_base)
    run_groups = functools.partial(
      hybrid.run_groups, reach=reach, unroll=unroll, remat=self.options.remat
    )
    hidden, memory, stats = run_groups(
      part, hidden, memory, tables, window.keys, window.packing
    )
    past = [windows.last(x, self.config.num_past, axis=3) for x in memory.past]
    return hidden, memory._replace(past=KeyValues(*past)), stats


def run_passes(
  config: Config,
  one_pass: Any,
  carry: Carry,
  num_passes: int,
  kind: driver.Kind,
  *,
  want_first: bool,
) -> tuple[Carry | None, Carry, dict[str, Array]]:
  """Runs the passes, with the gradient that the config describes.

  Returns:
    (the carry after the first pass, None unless `want_first`; the carry after
    the last pass; records [N, ...]).
  """
  return driver.run_truncated(
    one_pass,
    carry,
    num_passes,
    num_with_gradient=config.num_with_gradient,
    cut_fn=functools.partial(cut, config),
    want_first=want_first,
    kind=kind,
    part=STATE,
  )


def cut(config: Config, carry: Carry) -> Carry:
  """The carry, with gradients stopped as `gradient_cut` says."""
  hidden, memory = carry
  if config.gradient_cut in ("hidden", "both"):
    hidden = jax.lax.stop_gradient(hidden)
  if config.gradient_cut in ("fast_weights", "both"):
    memory = jax.lax.stop_gradient(memory)
  return hidden, memory


def _record(
  config: Config,
  hidden: Array,
  memory: hybrid.Memory,
  stats: dict[str, Array],
  mask: Array | None,
) -> dict[str, Array]:
  """Statistics of a pass, f32 [B], summed over the window's tokens."""
  fast = memory.state.fast
  # Fast weights may be zero, where the norm has no gradient.
  hidden, fast, stats = jax.lax.stop_gradient((hidden, fast, stats))
  weights = jnp.ones(hidden.shape[:2]) if mask is None else jnp.float32(mask)
  tokens = jnp.sum(weights, axis=1)
  norms = jnp.linalg.norm(fast, axis=(-2, -1))  # [groups, layers, B, H]
  norms = jnp.mean(norms, axis=(0, 1, 3))
  sums = {
    "num_tokens": tokens,
    "hidden_norm": jnp.sum(jnp.linalg.norm(hidden, axis=-1) * weights, axis=1),
    "fast_weight_norm": norms * tokens,
  }
  retentions = jnp.concatenate(stats["retention"])  # [layers, B, H]
  per_layer = config.num_memory_layers / config.num_layers
  first = round(per_layer * config.num_prelude)
  for layer, retention in enumerate(retentions, start=first):
    means = jnp.mean(retention, axis=-1)
    sums[f"retention/memory={layer}"] = means * tokens
  return sums


def split(tokens: Tokens, length: int) -> tuple[Tokens, Tokens]:
  """The windows [W, B, L] to sleep over, and the tokens after them [B, S]."""
  parts = [windows.split(x, length) for x in tokens if x is not None]
  slept, last = zip(*parts, strict=True)
  return Tokens(*slept), Tokens(*last)


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """Cross-entropy of the predicted tokens, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-pass vectors by name).
  """
  del key, step, teacher  # No dropout, no schedule, no teacher.
  return token_losses.output_loss(model, model(batch["inputs"]), batch)
