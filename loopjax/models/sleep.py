"""Sleep: passes over a window before it is dropped turn it into fast weights.

Source: "Language Models Need Sleep" (arXiv 2605.26099, algorithm 1). Attention
sees a window only. What a later window is to know of it must be in the fast
weights of the memory layers, which N passes over the window write; reading
takes one pass.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks, losses
from loopjax.errors import UserError
from loopjax.loop import driver, windows
from loopjax.nn import attention, hybrid, linear, norm, rope
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


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the paper's small model.

  The paper states width and layers; the rest is flash-linear-attention's.

  Attributes:
    width: D. num_layers: attention and memory layers in turn, so even.
    num_heads: of attention.
    mlp: "swiglu" or "gelu". mlp_ratio: F = floor(mlp_ratio D).
    memory: "gated_delta", or "jet" with a dynamic convolution of the values.
    num_memory_heads: H. key_width: d_k. value_width: d_v, each of one head.
    window: L, tokens that attention sees.
    num_passes: N, over every window that is dropped; 1 is the plain hybrid.
    eviction: "hard" drops a window whole; "sliding" keeps the keys and values
      of the last pass over the last L - 1 tokens.
    num_prelude_layers, num_coda_layers: so many at both ends run once a window,
      whatever N; even.
    pass_norm: an RMS norm between two passes.
    carry_convolutions: from window to window; else they start with zeros.
    gradient_passes: of the N passes, so many last ones get a gradient; 0 for
      all. Cut gradients reach no earlier window either.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix, the embedding table included.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 256
  num_layers: int = 4
  num_heads: int = 4
  mlp: str = "swiglu"
  mlp_ratio: float = 2.75
  memory: str = "gated_delta"
  num_memory_heads: int = 3
  key_width: int = 64
  value_width: int = 128
  window: int = 24
  num_passes: int = 1
  eviction: str = "hard"
  num_prelude_layers: int = 0
  num_coda_layers: int = 0
  pass_norm: bool = False
  carry_convolutions: bool = False
  gradient_passes: int = 0
  rope_base: float = 10_000.0
  init_std: float = 0.02
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model", self, eviction=("hard", "sliding"), precision=PRECISIONS
    )
    # The short convolutions of the memory layers see four tokens.
    checks.at_least("model", self, window=4, num_passes=1, gradient_passes=0)
    hybrid.check(self)
    if self.gradient_passes > self.num_passes:
      raise UserError(
        f"model.gradient_passes={self.gradient_passes} is more than"
        f" model.num_passes={self.num_passes}"
      )

  @property
  def num_loops(self) -> int:
    """N under the name that every family has."""
    return self.num_passes


class Model(nnx.Module):
  """Attention and fast weights in turn, with passes over windows."""

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    num_read = spec.sequence_length - spec.num_answer_tokens
    if spec.num_answer_tokens and num_read % config.window:
      raise UserError(
        f"model.window={config.window} does not divide the {num_read} tokens"
        " before the answer: its loss would lie in two windows"
      )
    shared: dict[str, Any] = {
      "precision": PRECISIONS[config.precision],
      "rngs": rngs,
    }
    self.token_embedding = linear.embedding(
      spec.vocab_size,
      config.width,
      init=nnx.initializers.normal(config.init_std),
      **shared,
    )
    self.pairs = hybrid.make_pairs(config, config.num_layers // 2, **shared)
    self.final_norm = norm.rms_norm(config.width, **shared)
    if config.pass_norm:
      self.pass_norm = norm.rms_norm(config.width, **shared)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Reads windows, sleeps over each, and predicts (algorithm 1).

    A task with answer tokens has them in a window of their own, which is read
    in one pass; nothing else is predicted. Where every token is predicted, it
    is in its first pass: in the second, it could read of later ones.

    Args:
      inputs: token ids [B, T]; any T if every token is predicted. Padding may
        stand anywhere and is not there for the other tokens.
      num_loops: N; any number from 1, whatever it was trained with.
      kind: how the passes run; the model's own options if None.
      trace: "hidden": the residual stream behind every pass over the windows,
        f32 [N, B, W L, D].

    Returns:
      logits of the answer or of all tokens [B, A or T, V]; loops, each [N]:
      "hidden_norm" and "fast_weight_norm" behind every pass, and by memory
      layer "retention", the part of fast weights that a pass leaves.
    """
    num_passes = self.config.num_passes if num_loops is None else num_loops
    if num_passes < 1:
      raise UserError(f"num_loops={num_passes} must be at least 1")
    kind = kind or self.options.kind
    slept, last = self._split(inputs)
    kept, records = driver.scan(
      lambda kept, window: self._sleep(kept, window, num_passes, kind, trace),
      self._nothing(len(inputs)),
      slept,
      unroll=kind == "unroll",
      remat=self.options.remat,
    )
    hidden = self._answer(kept, last)
    if not self.spec.num_answer_tokens:
      hidden = jnp.concatenate([windows.join(records.pop("awake")), hidden], 1)
    traces = {name: records.pop(name) for name in trace}
    records = records if len(slept.hidden) else {}  # Else nothing to average.
    return Output(
      logits=linear.token_logits(
        self.final_norm(hidden),
        self.token_embedding.embedding[...],
        self.spec.num_padding_tokens,
      ),
      losses={},
      stats={"loops_run": jnp.full(len(inputs), num_passes, jnp.float32)},
      loops={name: jnp.mean(x, axis=0) for name, x in records.items()},
      trace={  # [W, N, B, L, D] -> [N, B, W L, D]
        name: jax.vmap(windows.join, 1)(value) for name, value in traces.items()
      },
    )

  def _sleep(
    self,
    kept: "Kept",
    tokens: "Tokens",
    num_passes: int,
    kind: str,
    trace: tuple[str, ...],
  ) -> tuple["Kept", dict[str, Array]]:
    """Algorithm 1, lines 4 to 8: of a window, fast weights remain."""
    prelude, core, coda = self._parts()
    read = functools.partial(self._read, unroll=kind == "unroll")
    window = self._open(tokens, kept.seen)
    hidden, first, _ = read(prelude, tokens.hidden, window, kept.prelude)

    def one_pass(carry: Carry, n: Array) -> tuple[Carry, dict[str, Array]]:
      """h, S <- Blocks(h, S)."""
      del n
      hidden, memory = carry
      memory = hybrid.again(memory, kept.core)
      hidden, memory, stats = read(core, hidden, window, memory)
      hidden = self.pass_norm(hidden) if self.config.pass_norm else hidden
      return (hidden, memory), _record(hidden, memory, stats, trace)

    (awake, _), (asleep, memory), records = driver.run_truncated(
      one_pass,
      (hidden, kept.core),
      num_passes,
      num_with_gradient=self.config.gradient_passes,
      kind=kind,
    )
    _, behind, _ = read(coda, asleep, window, kept.coda)
    if not self.spec.num_answer_tokens:  # Predict before falling asleep.
      records["awake"] = read(coda, awake, window, kept.coda)[0]
    seen = windows.last(window.known, self._num_past)
    return Kept(first, memory, behind, seen), records

  def _answer(self, kept: "Kept", tokens: "Tokens") -> Array:
    """Line 10: the answer, or the last window, is read in one pass."""
    prelude, core, coda = self._parts()
    window = self._open(tokens, kept.seen)
    hidden, _, _ = self._read(prelude, tokens.hidden, window, kept.prelude)
    hidden, _, _ = self._read(core, hidden, window, kept.core)
    hidden = self.pass_norm(hidden) if self.config.pass_norm else hidden
    return self._read(coda, hidden, window, kept.coda)[0]

  def _parts(self) -> tuple[hybrid.Pair, hybrid.Pair, hybrid.Pair]:
    """The pairs that run once, N times, and once; each may be none."""
    config = self.config
    first = config.num_prelude_layers // 2
    last = (config.num_layers - config.num_coda_layers) // 2

    def part(start: int, end: int | None) -> hybrid.Pair:
      return jax.tree.map(lambda x: x[start:end], self.pairs)

    return part(0, first), part(first, last), part(last, None)

  def _nothing(self, batch: int) -> "Kept":
    """What is kept before the first window."""
    carry, num_past = self.config.carry_convolutions, self._num_past
    prelude, core, coda = (
      hybrid.empty_memory(part, batch, num_past, carry_convolutions=carry)
      for part in self._parts()
    )
    return Kept(prelude, core, coda, jnp.zeros((batch, num_past), bool))

  @property
  def _num_past(self) -> int:
    """P, tokens of which attention keeps keys and values."""
    return self.config.window - 1 if self.config.eviction == "sliding" else 0

  def _split(self, inputs: Array) -> tuple["Tokens", "Tokens"]:
    """The windows [W, B, L] to sleep over, and what is behind them [B, S]."""
    length, num_last = self.config.window, self.spec.num_answer_tokens
    parts = [windows.split(self.token_embedding(inputs), length, num_last)]
    if self.spec.num_padding_tokens:
      mask = inputs < self.spec.vocab_size - self.spec.num_padding_tokens
      parts.append(windows.split(mask, length, num_last))
    slept, last = zip(*parts, strict=True)
    return Tokens(*slept), Tokens(*last)

  def _open(self, tokens: "Tokens", seen: Array) -> windows.Window:
    """What the tokens of a window see, with P more before them."""
    size = tokens.hidden.shape[1]
    # An answer may be longer than a window.
    reach = self.config.window if self.config.eviction == "sliding" else size
    return windows.view(seen, tokens.mask, size, reach)

  def _read(
    self,
    part: hybrid.Pair,
    hidden: Array,
    window: windows.Window,
    memory: hybrid.Memory,
    *,
    unroll: bool = False,
  ) -> tuple[Array, hybrid.Memory, dict[str, Array]]:
    """Applies some pairs to a window; P tokens stay in sight of the next."""
    head_width = self.config.width // self.config.num_heads
    base = self.config.rope_base
    tables = rope.rope_tables(window.positions, head_width, base)
    hidden, memory, stats = hybrid.run_pairs(
      part,
      hidden,
      memory,
      tables,
      window.visible,
      window.mask,
      unroll=unroll,
    )
    past = [windows.last(x, self._num_past, axis=2) for x in memory.past]
    return hidden, memory._replace(past=attention.Past(*past)), stats


Carry = tuple[Array, hybrid.Memory]


class Tokens(NamedTuple):
  """Some tokens. hidden: [..., D]; mask: bool [...], False for padding."""

  hidden: Array
  mask: Array | None = None


class Kept(NamedTuple):
  """What one window leaves to the next.

  Attributes:
    prelude, core, coda: of the three parts of the stack.
    seen: bool [B, P], which of the P tokens that attention keeps are there.
  """

  prelude: hybrid.Memory
  core: hybrid.Memory
  coda: hybrid.Memory
  seen: Array


def _record(
  hidden: Array,
  memory: hybrid.Memory,
  stats: dict[str, Array],
  names: tuple[str, ...],
) -> dict[str, Array]:
  """Statistics of a pass, and what the caller asked to see of it."""
  fast = jnp.linalg.norm(memory.state.fast, axis=(-2, -1))
  record = {
    "hidden_norm": jnp.mean(jnp.linalg.norm(hidden, axis=-1)),
    "fast_weight_norm": jnp.mean(fast),
  }
  for pair, retention in enumerate(stats["retention"]):
    record[f"retention/memory={pair}"] = jnp.mean(retention)
  return record | {name: hidden for name in names}


def loss(
  model: Model, batch: Batch, key: Array, step: Array, frozen: Batch
) -> tuple[Array, Metrics]:
  """Cross-entropy of what is predicted, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-pass vectors by name).
  """
  del key, step, frozen  # No dropout, no schedule, no teacher.
  output = model(batch["inputs"])
  unpredicted = batch["inputs"].shape[1] - output.logits.shape[1]
  cross_entropy = losses.token_cross_entropy(
    output.logits, batch["targets"][:, unpredicted:]
  )
  cross_entropy = losses.weighted_mean(
    jnp.pad(cross_entropy, ((0, 0), (unpredicted, 0))),
    batch["weights"],
    batch.get("mean_weight"),
  )
  return cross_entropy, {"loss": cross_entropy, **output.loops}


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by number of passes, and what is kept.

  A multiply-add counts as two; point-wise operations are left out. Fast weights
  are all that is known of dropped windows, whatever their number.
  """
  length = config.window
  past = length - 1 if config.eviction == "sliding" else 0
  num_last = spec.num_answer_tokens or (spec.sequence_length - 1) % length + 1
  num_windows = (spec.sequence_length - num_last) // length
  outside = (config.num_prelude_layers + config.num_coda_layers) // 2
  inside = config.num_layers // 2 - outside
  slept = num_windows * hybrid.flops(config, length, past)
  last = (inside + outside) * hybrid.flops(config, num_last, past)
  predicted = num_last
  if not spec.num_answer_tokens:  # The coda also reads what has not slept.
    predicted = spec.sequence_length
    last += slept * config.num_coda_layers // 2
  head = 2 * predicted * config.width * spec.vocab_size
  fast = config.num_memory_heads * config.key_width * config.value_width
  itemsize = jnp.dtype(PRECISIONS[config.precision].compute).itemsize
  return {
    "flops_per_example": [
      head + last + slept * (outside + inside * passes)
      for passes in range(1, num_loops + 1)
    ],
    "cache_bytes_per_token": config.num_layers * config.width * itemsize,
    "fast_weight_bytes_per_example": 4 * fast * config.num_layers // 2,
  }
