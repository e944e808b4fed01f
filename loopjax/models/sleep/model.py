"""Sleep: passes that turn a window into fast weights before it is dropped.

Source: "Language Models Need Sleep" (arXiv 2605.26099, algorithm 1). Attention
sees one window only. What later windows need from it must be in the fast
weights of the memory layers, which N passes over the window write; reading
takes one pass.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver, windows
from loopjax.losses import tokens as token_losses
from loopjax.models import causal
from loopjax.models.sleep.config import Config, last_chunk
from loopjax.models.sleep.state import Kept, Tokens, padded
from loopjax.nn import attention, hybrid, norm, remat, rope
from loopjax.protocols import Frozen
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
HEADLINE: tuple[str, ...] = ()


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
    shared: dict[str, Any] = {
      "precision": PRECISIONS[config.precision],
      "rngs": rngs,
    }
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, rngs)
    # A norm would make an output that starts at zero as large as any other.
    alone = dataclasses.replace(config.block_shape(), post_norm=norm.none)
    self.memories = hybrid.make_memories(
      alone, config.memory_shape(), config.num_memory_layers, **shared
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
    kind: str | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Reads windows, sleeps over each, and predicts (algorithm 1).

    If the task has answer tokens, they end the chunk that `answer_chunk`
    describes, which is read in one pass; nothing else is predicted. Otherwise
    every token is predicted, from the first pass: in the second pass the fast
    weights would already contain later tokens.

    Args:
      inputs: token ids [B, T]; any T if every token is predicted. Padding may
        be anywhere: it occupies a place in its window but is never read.
      num_loops: N >= 1; it may differ from the trained number.
      kind: how the passes run; the model's own options if None.
      trace: "hidden": the residual stream after every pass over the windows,
        f32 [N, B, W L, D], including the padding of a separate answer.

    Returns:
      logits of the answer or of all tokens [B, A or T, V]; loops, each [N]:
      "hidden_norm" and "fast_weight_norm" after every pass, and "retention" of
      every memory layer that runs N times, the fraction of its fast weights
      that a pass retains. All are means over the windows' non-padding tokens.
    """
    num_passes = self.config.num_passes if num_loops is None else num_loops
    if num_passes < 1:
      raise UserError(f"num_loops={num_passes} must be at least 1")
    kind = kind or self.options.kind
    slept, last = self._split(inputs)
    kept, records = remat.scan(
      lambda kept, window: self.sleep(kept, window, num_passes, kind, trace),
      self.empty_state(
        len(inputs),
        num_past=self.num_past,
        carry_convolutions=self.config.carry_convolutions,
      ),
      slept,
      unroll=kind == "unroll",
    )
    hidden, _ = self.awake(kept, last)
    if self.spec.num_answer_tokens:
      hidden = windows.last(hidden, self.spec.num_answer_tokens)
    else:
      hidden = jnp.concatenate([windows.join(records.pop("awake")), hidden], 1)
    traces = {name: records.pop(name) for name in trace}
    num_tokens = jnp.maximum(jnp.sum(records.pop("num_tokens"), axis=0), 1)
    records = (
      records if len(slept.hidden) else {}
    )  # Else there is nothing to average.
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": jnp.full(len(inputs), num_passes, jnp.float32)},
      loops={
        name: jnp.sum(x, axis=0) / num_tokens for name, x in records.items()
      },
      trace={  # [W, N, B, L, D] -> [N, B, W L, D]
        name: jax.vmap(windows.join, 1)(value) for name, value in traces.items()
      },
      hidden=self.normed(hidden),
    )

  def sleep(
    self,
    kept: Kept,
    tokens: Tokens,
    num_passes: int,
    kind: str,
    trace: tuple[str, ...] = (),
  ) -> tuple[Kept, dict[str, Array]]:
    """Algorithm 1, lines 4 to 8: turns a window into fast weights."""
    prelude, core, coda = self.parts()
    old = kept.parts
    read = functools.partial(self._read, unroll=kind == "unroll")
    window = self._open(tokens, kept.seen)
    entering, first, _ = read(prelude, tokens.hidden, window, old[0])

    def one_pass(carry: Carry, n: Array) -> tuple[Carry, dict[str, Array]]:
      """h, S <- Blocks(h, S)."""
      hidden, memory = carry
      before = memory if self.config.carry_state else old[1]
      memory = hybrid.next_pass(before, old[1])
      hidden = self.between(hidden, entering, n)
      hidden, memory, stats = read(core, hidden, window, memory)
      record = self._record(hidden, memory, stats, tokens.mask)
      return (hidden, memory), record | {name: hidden for name in trace}

    first_pass, (asleep, memory), records = self._run_passes(
      one_pass, (entering, old[1]), num_passes, kind
    )
    hidden, last, _ = read(coda, asleep, window, old[2])
    if first_pass is not None:  # Predictions precede the sleep.
      if num_passes > 1:
        hidden, _, _ = read(coda, first_pass[0], window, old[2])
      records["awake"] = hidden
    seen = windows.last(window.known, self.num_past)
    return Kept((first, memory, last), seen), records

  def between(self, hidden: Array, entering: Array, n: Array) -> Array:
    """The input of pass n, [B, L, D]; of the first pass, the window itself."""
    next_input = self.final_norm(hidden) if self.config.pass_norm else hidden
    next_input = next_input + entering if self.config.inject else next_input
    return jnp.where(n > 0, next_input, hidden)

  def _run_passes(
    self, one_pass: Any, carry: "Carry", num_passes: int, kind: str
  ) -> tuple["Carry | None", "Carry", dict[str, Array]]:
    """(carry after the first pass if it predicts, after the last, records
    [N, ...])."""
    predicts = not self.spec.num_answer_tokens
    if terms := self.config.implicit_terms:
      first, last, records = driver.run_implicit(
        one_pass, carry, num_passes, num_terms=terms, kind=kind
      )
      return first if predicts else None, last, records
    return driver.run_truncated(
      one_pass,
      carry,
      num_passes,
      num_with_gradient=self.config.gradient_passes,
      cut_fn=self._cut,
      want_first=predicts,
      kind=kind,
    )

  def _cut(self, carry: "Carry") -> "Carry":
    """The carry with the gradient stopped in what `gradient_cut` names."""
    (hidden, memory), cut = carry, self.config.gradient_cut
    if cut in ("hidden", "both"):
      hidden = jax.lax.stop_gradient(hidden)
    if cut in ("fast_weights", "both"):
      memory = jax.lax.stop_gradient(memory)
    return hidden, memory

  def _record(
    self,
    hidden: Array,
    memory: hybrid.Memory,
    stats: dict[str, Array],
    mask: Array | None,
  ) -> dict[str, Array]:
    """Statistics of a pass, summed over the window's tokens."""
    fast = memory.state.fast  # May be zero, where the norm has no gradient.
    hidden, fast, stats = jax.lax.stop_gradient((hidden, fast, stats))
    there = jnp.ones(hidden.shape[:2]) if mask is None else jnp.float32(mask)
    tokens = jnp.sum(there, axis=1)
    norms = jnp.linalg.norm(fast, axis=(-2, -1))  # [groups, layers, B, H]
    norms = jnp.mean(norms, axis=(0, 1, 3))
    record = {
      "num_tokens": jnp.sum(tokens),
      "hidden_norm": jnp.sum(jnp.linalg.norm(hidden, axis=-1) * there),
      "fast_weight_norm": jnp.sum(norms * tokens),
    }
    retentions = jnp.concatenate(stats["retention"])  # [layers, B, H]
    config = self.config
    per_layer = config.num_memory_layers / config.num_layers
    first = round(per_layer * config.num_prelude_layers)
    for layer, retention in enumerate(retentions, start=first):
      means = jnp.mean(retention, axis=-1)
      record[f"retention/memory={layer}"] = jnp.sum(means * tokens)
    return record

  def awake(self, kept: Kept, tokens: Tokens) -> tuple[Array, Kept]:
    """Reads tokens in one pass: the answer (line 10), or those after the sleep.

    Args:
      kept: state left by earlier tokens.
      tokens: hidden [B, S, D].

    Returns:
      The residual stream [B, S, D], and the state after these tokens.
    """
    window = self._open(tokens, kept.seen)
    hidden, memories = tokens.hidden, []
    for part, memory in zip(self.parts(), kept.parts, strict=True):
      hidden, memory, _ = self._read(part, hidden, window, memory)
      memories.append(memory)
    seen = windows.last(window.known, self.num_past)
    return hidden, Kept(tuple(memories), seen)

  def normed(self, hidden: Array) -> Array:
    """What the read-out decodes, f32 [B, S, D]."""
    return self.final_norm(hidden)

  def parts(self) -> list[hybrid.Groups]:
    """The groups that run once, N times, and once; each may be empty."""
    config, groups = self.config, hybrid.grouped(self.layers, self.memories)
    each = config.num_layers // config.num_groups
    first = config.num_prelude_layers // each
    last = (config.num_layers - config.num_coda_layers) // each
    return [
      jax.tree.map(lambda x, part=part: x[part], groups)
      for part in (slice(first), slice(first, last), slice(last, None))
    ]

  def empty_state(
    self, batch: int, *, num_past: int, carry_convolutions: bool
  ) -> Kept:
    """The state before the first window, with room for P past tokens."""
    parts = tuple(
      hybrid.empty_memory(
        part, batch, num_past, carry_convolutions=carry_convolutions
      )
      for part in self.parts()
    )
    return Kept(parts, jnp.zeros((batch, num_past), bool))

  @property
  def num_past(self) -> int:
    """P, number of tokens whose keys and values survive a sleep."""
    return self.config.window - 1 if self.config.eviction == "sliding" else 0

  def _split(self, inputs: Array) -> tuple[Tokens, Tokens]:
    """The windows [W, B, L] to sleep over, and what follows them [B, S]."""
    tokens, length = self.embed(inputs), self.config.window
    num_last = 0  # The remainder.
    if self.config.answer_chunk == "separate":
      num_last = self.spec.num_answer_tokens
      short = (num_last - inputs.shape[1]) % length
      tokens = padded(tokens, short) if short else tokens
    parts = [
      windows.split(x, length, num_last) for x in tokens if x is not None
    ]
    slept, last = zip(*parts, strict=True)
    assert last[0].shape[1] >= self.spec.num_answer_tokens, inputs.shape
    return Tokens(*slept), Tokens(*last)

  def embed(self, inputs: Array) -> Tokens:
    """Embeds token ids [B, S] as input of the stack."""
    first_padding = self.spec.vocab_size - self.spec.num_padding_tokens
    mask = inputs < first_padding if self.spec.num_padding_tokens else None
    return Tokens(self.token_embedding(inputs), mask)

  def _open(self, tokens: Tokens, seen: Array) -> windows.Window:
    """What the tokens of a window see, with P past tokens before them."""
    size = tokens.hidden.shape[1]
    return windows.make_window(seen, tokens.mask, size, self.config.window)

  def _read(
    self,
    part: hybrid.Groups,
    hidden: Array,
    window: windows.Window,
    memory: hybrid.Memory,
    *,
    unroll: bool = False,
  ) -> tuple[Array, hybrid.Memory, dict[str, Array]]:
    """Applies groups to a window; P tokens stay visible to the next one."""
    if not len(jax.tree.leaves(part)[0]):  # An empty scan cannot be compiled.
      return hidden, memory, {}
    head_width = self.layers.attention.head_width
    base = self.config.rope_base
    tables = rope.rope_tables(window.positions, head_width, base)
    run_groups = remat.rematerialised(
      functools.partial(hybrid.run_groups, unroll=unroll),
      self.options.remat,
      prevent_cse=True,  # Answers are read outside of any scan.
    )
    hidden, memory, stats = run_groups(
      part, hidden, memory, tables, window.visible, window.packing
    )
    past = [windows.last(x, self.num_past, axis=3) for x in memory.past]
    return hidden, memory._replace(past=attention.PastKeyValues(*past)), stats


Carry = tuple[Array, hybrid.Memory]


def loss(
  model: Model, batch: Batch, key: Array, step: Array, frozen: Frozen
) -> tuple[Array, Metrics]:
  """Cross-entropy of the predicted tokens, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-pass vectors by name).
  """
  del key, step, frozen  # No dropout, no schedule, no teacher.
  output = model(batch["inputs"])
  cross_entropy, _ = token_losses.next_token(
    output.hidden,
    model.readout_table(),
    batch,
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )
  return cross_entropy, {"loss": cross_entropy, **output.loops}
