"""The settings of models that sleep, and their FLOPs."""

import dataclasses
from typing import Any

from loopjax import checks
from loopjax.errors import Moot, UserError
from loopjax.models import causal, starting
from loopjax.nn import block, hybrid, stack
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.fast_weights import shape as shape_lib
from loopjax.protocols import Start
from loopjax.types import TaskSpec

# The settings that belong together; the others are at the top level.
GROUPS = {
  "blocks": ("num_key_value_heads", "head_width", "norm_epsilon"),
  "memory": (
    "memory", "memory_mlp", "num_memory_heads", "key_width", "value_width",
    "A_range", "negative_eigenvalues",
  ),
  "windows": ("eviction", "carry_convolutions"),
  "passes": (
    "num_prelude", "num_coda", "loop_norm", "injection", "carry_state",
  ),
  "gradient": ("num_with_gradient", "gradient_cut"),
  "read-out": ("tied", "exit_gate"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """Hyper-parameters; the defaults are the paper's small model.

  The paper states width and layers. Sizes and gates of the memory are from
  flash-linear-attention; attention's heads and the MLP are ours.
  Those of `stack.StackConfig`, and, by the mechanisms in `GROUPS`:

  Attributes:
    num_layers, num_heads: numbers of attention layers and of their heads.
    num_memory_layers: number of memory layers. The smaller of the two numbers
      of layers must divide the other: it is the number of groups. A group has
      its attention layers first, then its memory layers.
    norm_order: RMS norms of attention layers, "pre" or "branch", see
      `stack.NORM_ORDERS`; memory layers always have "pre".
    window: L, number of tokens that attention sees, at least as many as an
      answer has.
    num_loops: N, passes, as the paper calls them, over every window before it
      is evicted; 1 is the plain hybrid.
    memory: "gated_delta", or "jet" with a dynamic convolution of the values.
    memory_mlp: whether memory layers have an MLP. Without it their output is
      initially zero, so that they can be inserted into a trained `looped`
      model.
    num_memory_heads: number of heads of a memory layer.
    key_width, value_width: d_k and d_v of one of them.
    A_range: initial decay rates, see `fast_weights.Gates`.
    negative_eigenvalues: see `fast_weights.Gates`.
    eviction: "hard": all keys and values of a window are dropped; "sliding":
      those of its last L - 1 tokens, from the last pass, are kept.
    carry_convolutions: whether the short convolutions continue across windows;
      else every window starts with zeros.
    num_prelude, num_coda: how many of the `num_layers` attention layers, the
      first and the last ones, run once per window, whatever N.
    loop_norm: "per_loop": the final norm is also applied between passes, as in
      `looped`, but not before the coda; "final_only": only before the read-out.
    injection: how the input of the first pass enters every later one: "none" or
      "add", see `loop.injection`.
    carry_state: whether a pass starts from the fast weights of the previous
      pass (algorithm 1); else from those at the start of the window. The fast
      weights of the last pass are passed to the next window in both cases.
    num_with_gradient: number of last passes, of the N, between which no
      gradient is stopped; 0 for all. `gradient_cut` says what is stopped before
      them.
    gradient_cut: where gradients between the earlier passes are stopped.
      "hidden": in the residual stream; every pass still gets the gradient of
      the fast weights that it wrote. "fast_weights": in the fast weights only.
      "both": earlier passes get no gradient, and a window gets one only through
      `injection`, its last tokens, the convolutions or, without carry_state,
      the fast weights.
    tied: whether the read-out uses the embedding table; else it has its own.
    exit_gate: "none"; or "unused": the gate of the `looped` model that the
      parameters come from.
  """

  width: int = 256
  num_layers: int = 2
  num_heads: int = 4
  mlp: str = "swiglu"
  mlp_ratio: float = 2.75
  num_memory_layers: int = checks.setting(2, least=1)
  norm_order: str = "pre"
  # The short convolutions of the memory layers span four tokens.
  window: int = checks.setting(24, least=4, own=True)
  num_loops: int = checks.setting(1, least=1)
  memory: str = "gated_delta"
  memory_mlp: bool = True
  num_memory_heads: int = checks.setting(3, least=1)
  key_width: int = checks.setting(64, least=1)
  value_width: int = checks.setting(128, least=1)
  A_range: tuple[float, float] = (0.0, 16.0)
  negative_eigenvalues: bool = False
  eviction: str = "hard"
  carry_convolutions: bool = False
  num_prelude: int = checks.setting(0, least=0, own=True)
  num_coda: int = checks.setting(0, least=0, own=True)
  loop_norm: str = "final_only"
  injection: str = "none"
  carry_state: bool = True
  num_with_gradient: int = checks.setting(0, least=0)
  gradient_cut: str = "hidden"
  tied: bool = True
  exit_gate: str = "none"

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of(
      "model",
      self,
      eviction=("hard", "sliding"),
      exit_gate=("none", "unused"),
      gradient_cut=("hidden", "fast_weights", "both"),
      norm_order=stack.INNER_NORMS,
      loop_norm=causal.LOOP_NORMS,
      injection=("none", "add"),
    )
    self._check_layers()
    self.memory_shape()
    if self.num_with_gradient > self.num_loops:
      raise UserError(
        f"model.num_with_gradient={self.num_with_gradient} is more than"
        f" model.num_loops={self.num_loops}",
        (Moot("model.num_with_gradient", 0, ("model.num_loops",)),),
      )
    if self.num_loops == 1:
      checks.without_effect("model", self, "num_loops", "injection")
    if not self.num_with_gradient:
      checks.without_effect("model", self, "num_with_gradient", "gradient_cut")
    if not self.carry_state:
      why = ": passes do not read each other's fast weights"
      checks.without_effect(
        "model", self, "carry_state", "gradient_cut", why=why
      )

  @property
  def num_groups(self) -> int:
    """Number of groups of attention layers followed by memory layers."""
    return min(self.num_layers, self.num_memory_layers)

  def _check_layers(self) -> None:
    """Raises UserError if the layers cannot be grouped."""
    checks.one_of("model", self, memory=hybrid.MEMORIES)
    if max(self.num_layers, self.num_memory_layers) % self.num_groups:
      raise UserError(
        f"model.num_memory_layers={self.num_memory_layers} must divide"
        f" model.num_layers={self.num_layers} or be a multiple of it: all"
        " groups have the same layers"
      )
    each = self.num_layers // self.num_groups
    for name in ("num_prelude", "num_coda"):
      if getattr(self, name) % each:
        raise UserError(
          f"model.{name}={getattr(self, name)} must be a multiple of {each},"
          " the attention layers of a group"
        )
    if self.num_prelude + self.num_coda >= self.num_layers:
      raise UserError(
        f"model.num_layers={self.num_layers} has no layers left between"
        f" model.num_prelude={self.num_prelude} and"
        f" model.num_coda={self.num_coda}"
      )

  @property
  def num_past(self) -> int:
    """P, number of tokens whose keys and values are kept after a window."""
    return self.window - 1 if self.eviction == "sliding" else 0

  def memory_shape(self) -> shape_lib.MemoryShape:
    """Structure of the memory blocks; raises UserError for invalid gates."""
    return shape_lib.MemoryShape(
      self.memory,
      self.num_memory_heads,
      self.key_width,
      self.value_width,
      fast_weights.Gates(self.A_range, self.negative_eigenvalues),
      has_mlp=self.memory_mlp,
    )


def made_from(source: Any) -> Start:
  """See `Family.made_from`: memory layers without effect are inserted.

  Their number is a quarter of the layers, as in the paper, or the next smaller
  divisor of these. They have as many heads as attention; the keys of all heads
  together are 3/4 of D wide, and the values twice as much.
  """
  shared = starting.settings(source, Config)
  layers, heads = source.num_layers, source.num_heads
  max_memory_layers = max(1, layers // 4)
  key_width = max(1, 3 * source.width // (4 * heads))
  inserted = {
    "memory_mlp": False,
    "num_memory_layers": max(
      n for n in range(1, max_memory_layers + 1) if not layers % n
    ),
    "num_memory_heads": heads,
    "key_width": key_width,
    "value_width": 2 * key_width,
    "num_prelude": 0,
    "num_coda": 0,
  }
  return Start({**shared, **inserted}, "^memories/")


def last_chunk(config: Config, spec: TaskSpec) -> int:
  """Number of tokens that are read in one pass, after the last whole window."""
  length, answer = config.window, spec.num_answer_tokens
  remainder = (spec.sequence_length - 1) % length + 1
  if answer > length:
    raise UserError(
      f"model.window={length} is less than the {answer} tokens of an answer"
    )
  if remainder < answer:
    raise UserError(
      f"model.window={length} leaves {remainder} of {spec.sequence_length}"
      f" tokens after whole windows, fewer than the {answer} of an answer,"
      " which would span two windows"
    )
  return remainder


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs on one example, by number of passes, and of training."""
  shape, length = config.block_shape(), config.window
  num_last = last_chunk(config, spec)
  num_windows = -(-(spec.sequence_length - num_last) // length)
  outside = config.num_prelude + config.num_coda
  inside = config.num_layers - outside
  per_layer = config.num_memory_layers / config.num_layers

  def layer_flops(num_tokens: int) -> float:
    """FLOPs of an attention layer and its share of the memory layers."""
    memory = shape_lib.memory_flops(shape, config.memory_shape(), num_tokens)
    attention = block.flops(shape, num_tokens, config.num_past)
    return attention + memory * per_layer

  slept = num_windows * layer_flops(length)
  last = config.num_layers * layer_flops(num_last)
  predicts = not spec.num_answer_tokens
  predicted = spec.num_answer_tokens or spec.sequence_length
  head = 2 * predicted * config.width * spec.vocab_size

  def once(passes: int) -> float:
    """FLOPs outside the passes; a coda that predicts tokens may run twice."""
    second_coda = config.num_coda if predicts and passes > 1 else 0
    return head + last + slept * (outside + second_coda)

  return {
    "flops_per_example": [
      round(once(passes) + slept * inside * passes)
      for passes in range(1, num_loops + 1)
    ],
    "training_flops_per_example": round(
      3 * once(num_loops)
      + slept
      * inside
      * (num_loops + 2 * _passes_back(config, predicts, num_loops))
    ),
  }


def _passes_back(config: Config, predicts: bool, num_passes: int) -> int:
  """Number of backward passes through the core."""
  first = int(predicts)  # It predicts tokens, so its gradient is never cut.
  # With "hidden" or "fast_weights", gradients still pass through all passes.
  truncated = config.gradient_cut == "both" or not config.carry_state
  backward = (truncated and config.num_with_gradient) or num_passes
  return min(backward + first, num_passes)
