"""MELT's sizes and switches, and what they cost."""

import dataclasses

from loopjax import checks
from loopjax.errors import UserError
from loopjax.nn import block, stack
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, TaskSpec

# How much of the latent a loop keeps: learned by feature or by token; fixed, so
# that the latent is the mean over loops, a moving average, or one loop's input.
GATES = ("element", "scalar", "mean", "ema", "last", "first")
LEARNED = ("element", "scalar")
DISTILL = ("all", "last", "none")
_HISTORY = ("history_reach", "history_hops")


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are those of MELT-1.6B.

  Attributes:
    width: D. num_layers: L of the stack. num_heads: H.
    num_key_value_heads: G, each read by H / G query heads; 0 for H.
    head_width: d_h; 0 for D / H.
    mlp: a key of `mlp.MLPS`. mlp_ratio: F = floor(mlp_ratio D).
    post_norm: RMS norms after attention and MLP, too (Ouro, arXiv 2510.25741).
    num_loops: K, in training.
    tied: one table encodes and decodes, or the read-out is a matrix of its own.
    exit_gate: "none", or "unused", one that came with the parameters and is not
      trained further. Tokens can leave the loop by it.
    gate: the share of the latent that a loop keeps, one of GATES (section
      4.4.1). Whatever it is, the first loop's latent is its input.
    gate_bias: b_z at the start; log odds of what is kept.
    chunk_size: tokens that are trained in parallel; 0 for all of a row. It
      divides the row.
    prefill_chunk: tokens that are read in parallel, whenever no gradient is
      needed; 1 reads as token by token. 0 for chunk_size.
    history_reach: chunks that a gradient goes back; 0 for none, -1 for all.
    history_hops: gradients of all chunks at once, which go this many times from
      chunk to chunk; -1 for chunk by chunk, exactly and with less memory.
    sweeps: over all chunks at once, each with the history of the one before; 0
      for chunk by chunk.
    chunk_jitter: chunks of a step begin at random places of the rows.
    alpha: share of the latent in keys and values at the first step, against
      the input that a looped model takes (phase 1; section 3.3).
    interpolation_steps: of which alpha is 1 from the last on, linearly; 0 for
      an alpha that stays.
    distill: read-outs that learn those of run.teacher, after "all" loops or the
      "last" one; "none" learns the tokens of the text instead.
    distill_beta: of the generalized Jensen-Shannon divergence; 0 for KL(teacher
      || model), 1 for KL(model || teacher).
    align_weight: of the squared distance between attention outputs and those of
      the teacher, mean over features, layers and loops (phase 2).
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix, the embedding table included.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 2048
  num_layers: int = 24
  num_heads: int = 16
  num_key_value_heads: int = 0
  head_width: int = 0
  mlp: str = "swiglu"
  mlp_ratio: float = 2.75
  post_norm: bool = True
  num_loops: int = 4
  tied: bool = False
  exit_gate: str = "none"
  gate: str = "element"
  gate_bias: float = 0.0
  chunk_size: int = 500
  prefill_chunk: int = 0
  history_reach: int = -1
  history_hops: int = -1
  sweeps: int = 0
  chunk_jitter: bool = False
  alpha: float = 1.0
  interpolation_steps: int = 0
  distill: str = "all"
  distill_beta: float = 0.5
  align_weight: float = 0.0
  rope_base: float = 1e6
  init_std: float = 0.02
  precision: str = "bfloat16"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      exit_gate=("none", "unused"),
      gate=GATES,
      distill=DISTILL,
      precision=PRECISIONS,
    )
    checks.at_least(
      "model",
      self,
      num_loops=1,
      num_layers=1,
      chunk_size=0,
      prefill_chunk=0,
      history_reach=-1,
      history_hops=-1,
      sweeps=0,
      interpolation_steps=0,
      align_weight=0,
      rope_base=1,
      init_std=0,
    )
    for name in ("alpha", "distill_beta"):
      if not 0 <= getattr(self, name) <= 1:
        raise UserError(f"model.{name}={getattr(self, name)} must be in [0, 1]")
    if self.interpolation_steps == 1:
      raise UserError("model.interpolation_steps=1 must be 0 or at least 2")
    self._check_effects()
    self.block_shape()

  def _check_effects(self) -> None:
    """Raises UserError for a setting that another one disables."""
    for field, values, idle in (
      ("alpha", (1.0,), ("interpolation_steps",)),
      ("distill", ("none",), ("distill_beta", "align_weight")),
      ("gate", set(GATES) - set(LEARNED), ("gate_bias",)),
      ("chunk_size", (0,), (*_HISTORY, "sweeps", "chunk_jitter")),
    ):
      if getattr(self, field) in values:
        because = f"model.{field}={getattr(self, field)!r}"
        checks.without_effect("model", self, because, *idle)
    if self.history_hops >= 0:
      because = f"model.history_hops={self.history_hops}"
      checks.without_effect("model", self, because, "history_reach")
    if self.sweeps:
      because = f"model.sweeps={self.sweeps}"
      checks.without_effect("model", self, because, *_HISTORY)

  def block_shape(self) -> Shape:
    """Structure of the stack's blocks; raises UserError if it is invalid."""
    return stack.block_shape(
      width=self.width,
      num_heads=self.num_heads,
      num_key_value_heads=self.num_key_value_heads,
      head_width=self.head_width,
      mlp=self.mlp,
      mlp_ratio=self.mlp_ratio,
      post_norm=self.post_norm,
      init_std=self.init_std,
    )

  def read_chunk(self, spec: TaskSpec) -> int:
    """Tokens that are read in parallel."""
    return self.prefill_chunk or self.chunk_size or spec.sequence_length

  def check_length(self, spec: TaskSpec) -> None:
    """Raises UserError unless rows are whole numbers of chunks."""
    if self.chunk_size and spec.sequence_length % self.chunk_size:
      raise UserError(
        f"model.chunk_size={self.chunk_size} does not divide the"
        f" {spec.sequence_length} tokens of a row"
      )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by loop, read as without a gradient.

  A multiply-add counts as two; point-wise operations are left out. Attention
  counts the whole history for every chunk, and gates every loop, the first one
  included, as they are computed.

  Raises:
    UserError: more loops than the model was trained with. Each would change
      what earlier loops see, so that no run of more loops has those of fewer.
  """
  if num_loops > config.num_loops:
    raise UserError(
      f"{num_loops} loops are more than model.num_loops={config.num_loops};"
      " later ones change what tokens leave to those after them"
    )
  tokens, width = spec.sequence_length, config.width
  chunk = config.read_chunk(spec)
  past = chunk if chunk < tokens else 0
  per_layer = block.flops(config.block_shape(), tokens, past)
  if config.gate in LEARNED:
    features = width if config.gate == "element" else 1
    per_layer += 4 * tokens * width * features
  head = 2 * tokens * width * spec.vocab_size
  return {
    "flops_per_example": [
      head + per_layer * config.num_layers * (loop + 1)
      for loop in range(num_loops)
    ],
  }
