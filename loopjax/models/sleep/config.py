"""What can be set about models that sleep, and what they cost."""

import dataclasses

from loopjax import checks
from loopjax.errors import UserError
from loopjax.nn import block, fast_weights, hybrid, stack
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, TaskSpec


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the paper's small model.

  The paper states width and layers; the rest is flash-linear-attention's.

  Attributes:
    width: D. num_layers: of attention. num_heads: of attention.
    num_memory_layers: each after as many layers of attention.
    mlp: "swiglu", "geglu" or "gelu". mlp_ratio: F = floor(mlp_ratio D).
    memory: "gated_delta", or "jet" with a dynamic convolution of the values.
    memory_mlp: whether memory layers have an MLP of their own; without one they
      start as zero, to be put into a trained `looped` model.
    num_memory_heads: H. key_width: d_k. value_width: d_v, each of one head.
    A_range, dt_range: how fast they forget at first, see `fast_weights.Gates`.
    negative_eigenvalues: a token may turn around what its key reads; see there.
    window: L, tokens that attention sees; an answer has no more.
    answer_chunk: what is read once, with an answer at its end. "merged": all
      that is left behind whole windows (algorithm 1, line 2). "separate": the
      answer alone; what stands before it is padded in front to whole windows.
      The same where the window divides what stands before the answer.
    num_passes: N, over every window that is dropped; 1 is the plain hybrid.
    eviction: "hard" drops a window whole; "sliding" keeps the keys and values
      of the last pass over the last L - 1 tokens.
    num_prelude_layers, num_coda_layers: so many layers of attention at both
      ends, and the memory after them, run once a window, whatever N.
    pass_norm: the final norm stands between two passes too, as in `looped`.
    inject: every pass reads what the first did, beside what the last left.
    carry_state: a pass goes on from the fast weights of the last (algorithm 1);
      else from those that the window began with, and the last pass's remain.
    carry_convolutions: from window to window; else they start with zeros.
    gradient_passes: back-propagation is truncated to so many last ones of the N
      passes; 0 for all.
    gradient_cut: what no gradient goes through before those, from pass to pass.
      "hidden": the residual stream; what a pass wrote has the gradient of that
      one pass, and slept windows are reached through their fast weights.
      "fast_weights": these alone. "both": then earlier passes have no backward
      pass, and no slept window gets a gradient but by what is read of it anew:
      by `inject`, its last tokens, convolutions, or, without carry_state, its
      fast weights.
    implicit_terms: passes are taken to have reached a fixed point, whose
      gradient is so many terms of a series; 0 for that of the passes.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix, the embedding table included.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 256
  num_layers: int = 2
  num_heads: int = 4
  num_memory_layers: int = 2
  mlp: str = "swiglu"
  mlp_ratio: float = 2.75
  memory: str = "gated_delta"
  memory_mlp: bool = True
  num_memory_heads: int = 3
  key_width: int = 64
  value_width: int = 128
  A_range: tuple[float, float] = (0.0, 16.0)
  dt_range: tuple[float, float] = (1e-3, 0.1)
  negative_eigenvalues: bool = False
  window: int = 24
  answer_chunk: str = "merged"
  num_passes: int = 1
  eviction: str = "hard"
  num_prelude_layers: int = 0
  num_coda_layers: int = 0
  pass_norm: bool = False
  inject: bool = False
  carry_state: bool = True
  carry_convolutions: bool = False
  gradient_passes: int = 0
  gradient_cut: str = "hidden"
  implicit_terms: int = 0
  rope_base: float = 10_000.0
  init_std: float = 0.02
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      answer_chunk=("merged", "separate"),
      eviction=("hard", "sliding"),
      gradient_cut=("hidden", "fast_weights", "both"),
      precision=PRECISIONS,
    )
    # The short convolutions of the memory layers see four tokens.
    checks.at_least("model", self, window=4, num_passes=1)
    checks.at_least("model", self, gradient_passes=0, implicit_terms=0)
    self._check_layers()
    self.block_shape()
    self.memory_shape()
    if self.gradient_passes > self.num_passes:
      raise UserError(
        f"model.gradient_passes={self.gradient_passes} is more than"
        f" model.num_passes={self.num_passes}"
      )
    if not self.gradient_passes:
      because = "model.gradient_passes=0"
      checks.without_effect("model", self, because, "gradient_cut")
    if not self.carry_state:
      because = "model.carry_state=False: a pass reads none of the last's"
      checks.without_effect("model", self, because, "gradient_cut")
    if self.implicit_terms and (self.carry_state or not self.inject):
      raise UserError(
        "model.implicit_terms needs model.inject=True and"
        " model.carry_state=False: a fixed point of other passes would know"
        " neither the window nor those before it"
      )
    if self.implicit_terms and self.num_passes == 1:
      raise UserError(
        f"model.implicit_terms={self.implicit_terms} has no effect while"
        " model.num_passes=1: one pass has a gradient of its own"
      )
    if self.implicit_terms:
      because = f"model.implicit_terms={self.implicit_terms}"
      checks.without_effect("model", self, because, "gradient_passes")

  @property
  def num_loops(self) -> int:
    """N under the name that every family has."""
    return self.num_passes

  def _check_layers(self) -> None:
    """Raises UserError unless the layers form groups."""
    checks.one_of("model", self, memory=hybrid.MEMORIES)
    checks.at_least(
      "model",
      self,
      num_layers=1,
      num_memory_layers=1,
      num_prelude_layers=0,
      num_coda_layers=0,
      num_memory_heads=1,
      key_width=1,
      value_width=1,
      rope_base=1,
      init_std=0,
    )
    each, rest = divmod(self.num_layers, self.num_memory_layers)
    if rest or not each:
      raise UserError(
        f"model.num_memory_layers={self.num_memory_layers} must divide"
        f" model.num_layers={self.num_layers}: as many layers of attention"
        " stand before each"
      )
    for name in ("num_prelude_layers", "num_coda_layers"):
      if getattr(self, name) % each:
        raise UserError(
          f"model.{name}={getattr(self, name)} must be a multiple of {each},"
          " the layers of attention before one of memory"
        )
    if self.num_prelude_layers + self.num_coda_layers >= self.num_layers:
      raise UserError(
        f"model.num_layers={self.num_layers} leaves no layer between"
        f" model.num_prelude_layers={self.num_prelude_layers} and"
        f" model.num_coda_layers={self.num_coda_layers}"
      )

  def block_shape(self) -> Shape:
    """What blocks are made of; raises UserError if there are no such blocks."""
    return stack.block_shape(
      width=self.width,
      num_heads=self.num_heads,
      mlp=self.mlp,
      mlp_ratio=self.mlp_ratio,
      init_std=self.init_std,
    )

  def memory_shape(self) -> hybrid.MemoryShape:
    """What blocks of memory have beside; raises UserError for their gates."""
    return hybrid.MemoryShape(
      self.memory,
      self.num_memory_heads,
      self.key_width,
      self.value_width,
      fast_weights.Gates(
        self.A_range, self.dt_range, self.negative_eigenvalues
      ),
      has_mlp=self.memory_mlp,
    )


def last_chunk(config: Config, spec: TaskSpec) -> int:
  """Tokens of an example that do not sleep; raises UserError if none do."""
  length, answer = config.window, spec.num_answer_tokens
  rest = (spec.sequence_length - 1) % length + 1
  if not answer:
    because = "no token of the task is an answer"
    checks.without_effect("model", config, because, "answer_chunk")
    return rest
  if answer > length:
    raise UserError(
      f"model.window={length} is less than the {answer} tokens of an answer"
    )
  if config.answer_chunk == "separate":
    return answer
  if rest < answer:
    raise UserError(
      f"model.window={length} leaves {rest} of {spec.sequence_length} tokens"
      f" behind whole windows, fewer than the {answer} of an answer: its loss"
      " would lie in two windows (model.answer_chunk='separate' pads them)"
    )
  return rest


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by number of passes, and what is kept.

  A multiply-add counts as two; point-wise operations are left out. Fast weights
  are all that is known of dropped windows, whatever their number.
  """
  shape, length = config.block_shape(), config.window
  past = length - 1 if config.eviction == "sliding" else 0
  num_last = last_chunk(config, spec)
  num_windows = -(-(spec.sequence_length - num_last) // length)
  outside = config.num_prelude_layers + config.num_coda_layers
  inside = config.num_layers - outside
  each = config.num_layers // config.num_memory_layers

  def of_layer(num_tokens: int) -> float:
    """An attention layer and its share of a memory layer."""
    memory = hybrid.memory_flops(shape, config.memory_shape(), num_tokens)
    return block.flops(shape, num_tokens, past) + memory / each

  slept = num_windows * of_layer(length)
  last = (inside + outside) * of_layer(num_last)
  predicts = not spec.num_answer_tokens
  predicted = spec.num_answer_tokens or spec.sequence_length

  def once(passes: int) -> float:
    """What runs whatever the passes, but for the coda of what has not slept."""
    second_coda = config.num_coda_layers if predicts and passes > 1 else 0
    return head + last + slept * (outside + second_coda)

  head = 2 * predicted * config.width * spec.vocab_size
  fast = config.num_memory_heads * config.key_width * config.value_width
  cache = block.cache_bytes(shape, PRECISIONS[config.precision])
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
    "cache_bytes_per_token": cache * config.num_layers,
    "fast_weight_bytes_per_example": 4 * fast * config.num_memory_layers,
  }


def _passes_back(config: Config, predicts: bool, num_passes: int) -> int:
  """Backward passes through the core: of the loss, and of the series."""
  first = int(predicts)  # It predicts, and has its gradient whatever is cut.
  if config.implicit_terms:
    return 1 + config.implicit_terms + first
  # A pass whose fast weights go on to the next is a part of their gradient.
  ends = config.gradient_cut == "both" or not config.carry_state
  kept = (ends and config.gradient_passes) or num_passes
  return min(kept + first, num_passes)
