"""The settings and costs of models that sleep."""

import dataclasses

from loopjax import checks
from loopjax.errors import UserError
from loopjax.nn import block, fast_weights, hybrid, stack
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, TaskSpec


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the paper's small model.

  The paper states width and layers; the rest is from flash-linear-attention.

  Attributes:
    width: D. num_layers: attention layers. num_heads: attention heads.
    num_memory_layers: memory layers. The number of either kind divides the
      other's: layers form groups, with one layer of the less frequent kind and
      an even share of the other kind. Attention comes first in each.
    mlp: "swiglu", "geglu" or "gelu". mlp_ratio: F = floor(mlp_ratio D).
    post_norm: RMS norms after attention and MLP, too (Ouro, arXiv 2510.25741);
      memory layers have none.
    tied: one table encodes and decodes, or the read-out is a matrix of its own.
    exit_gate: "none", or "unused", one that came with the parameters of a
      `looped` model.
    memory: "gated_delta", or "jet" with a dynamic convolution of the values.
    memory_mlp: whether memory layers have their own MLP; without one their
      output starts at zero, to be inserted into a trained `looped` model.
    num_memory_heads: H. key_width, value_width: d_k and d_v of one head.
    A_range, dt_range: initial rate of forgetting, see `fast_weights.Gates`.
    negative_eigenvalues: see `fast_weights.Gates`.
    window: L, tokens that attention sees; an answer must not be longer.
    answer_chunk: what is read once, with an answer at its end. "merged": all
      tokens left after whole windows (algorithm 1, line 2). "separate": only
      the answer; the tokens before it are left-padded to whole windows. Both
      are the same where the window divides the tokens before the answer.
    num_passes: N, over every window that is dropped; 1 is the plain hybrid.
    eviction: "hard" drops a window whole; "sliding" keeps the keys and values
      of the last pass over the last L - 1 tokens.
    num_prelude_layers, num_coda_layers: attention layers of the groups at
      either end that run once per window, whatever N.
    pass_norm: also apply the final norm between two passes, as in `looped`.
    inject: add the input of the first pass to the input of every later one.
    carry_state: a pass starts from the fast weights of the previous pass
      (algorithm 1); else from those at the start of the window, and those of
      the last pass are kept.
    carry_convolutions: from window to window; else they start with zeros.
    gradient_passes: back-propagation is truncated to this many last passes of
      the N; 0 for all.
    gradient_cut: where the gradient between earlier passes is stopped.
      "hidden": in the residual stream; what a pass wrote has the gradient of
      that pass only, and slept windows are reached through their fast weights.
      "fast_weights": only in these. "both": earlier passes then have no
      backward pass, and a slept window gets a gradient only where it is read
      again: by `inject`, its last tokens, convolutions, or, without
      carry_state, its fast weights.
    implicit_terms: treat the passes as converged to a fixed point, whose
      gradient is a series of this many terms; 0 for the gradient of the passes.
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
  post_norm: bool = False
  tied: bool = True
  exit_gate: str = "none"
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
      exit_gate=("none", "unused"),
      gradient_cut=("hidden", "fast_weights", "both"),
      precision=PRECISIONS,
    )
    # The short convolutions of the memory layers span four tokens.
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
      because = (
        "model.carry_state=False: a pass reads none of the previous one's"
      )
      checks.without_effect("model", self, because, "gradient_cut")
    if self.implicit_terms and (self.carry_state or not self.inject):
      raise UserError(
        "model.implicit_terms needs model.inject=True and"
        " model.carry_state=False: otherwise the fixed point would depend on"
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
    """N, under the name that all families share."""
    return self.num_passes

  @property
  def num_groups(self) -> int:
    """Of attention layers, and memory layers after them."""
    return min(self.num_layers, self.num_memory_layers)

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
    if max(self.num_layers, self.num_memory_layers) % self.num_groups:
      raise UserError(
        f"model.num_memory_layers={self.num_memory_layers} must divide"
        f" model.num_layers={self.num_layers} or be a multiple of it: all"
        " groups have the same layers"
      )
    each = self.num_layers // self.num_groups
    for name in ("num_prelude_layers", "num_coda_layers"):
      if getattr(self, name) % each:
        raise UserError(
          f"model.{name}={getattr(self, name)} must be a multiple of {each},"
          " the attention layers of a group"
        )
    if self.num_prelude_layers + self.num_coda_layers >= self.num_layers:
      raise UserError(
        f"model.num_layers={self.num_layers} leaves no layer between"
        f" model.num_prelude_layers={self.num_prelude_layers} and"
        f" model.num_coda_layers={self.num_coda_layers}"
      )

  def block_shape(self) -> Shape:
    """Structure of the attention blocks; raises UserError if it is invalid."""
    return stack.block_shape(
      width=self.width,
      num_heads=self.num_heads,
      mlp=self.mlp,
      mlp_ratio=self.mlp_ratio,
      post_norm=self.post_norm,
      init_std=self.init_std,
    )

  def memory_shape(self) -> hybrid.MemoryShape:
    """What memory blocks have besides; raises UserError for invalid gates."""
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
  """Tokens of an example that are read once; UserError if an answer is cut."""
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
      f" after whole windows, fewer than the {answer} of an answer, which would"
      " span two windows (model.answer_chunk='separate' pads them)"
    )
  return rest


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by number of passes.

  A multiply-add counts as two; point-wise operations are left out.
  """
  shape, length = config.block_shape(), config.window
  past = length - 1 if config.eviction == "sliding" else 0
  num_last = last_chunk(config, spec)
  num_windows = -(-(spec.sequence_length - num_last) // length)
  outside = config.num_prelude_layers + config.num_coda_layers
  inside = config.num_layers - outside
  per_layer = config.num_memory_layers / config.num_layers

  def of_layer(num_tokens: int) -> float:
    """FLOPs of an attention layer and its share of the memory layers."""
    memory = hybrid.memory_flops(shape, config.memory_shape(), num_tokens)
    return block.flops(shape, num_tokens, past) + memory * per_layer

  slept = num_windows * of_layer(length)
  last = (inside + outside) * of_layer(num_last)
  predicts = not spec.num_answer_tokens
  predicted = spec.num_answer_tokens or spec.sequence_length

  def once(passes: int) -> float:
    """FLOPs outside the passes, where a predicting coda may run twice."""
    second_coda = config.num_coda_layers if predicts and passes > 1 else 0
    return head + last + slept * (outside + second_coda)

  head = 2 * predicted * config.width * spec.vocab_size
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
  """Number of backward passes through the core, including series terms."""
  first = int(predicts)  # It predicts, so it has a gradient despite the cut.
  if config.implicit_terms:
    return 1 + config.implicit_terms + first
  # A pass that hands its fast weights to the next is part of their gradient.
  ends = config.gradient_cut == "both" or not config.carry_state
  kept = (ends and config.gradient_passes) or num_passes
  return min(kept + first, num_passes)
