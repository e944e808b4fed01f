"""The settings of MELT, and its FLOPs."""

import dataclasses
from typing import Any, NamedTuple

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver
from loopjax.models import starting
from loopjax.nn import block, stack
from loopjax.protocols import Start
from loopjax.types import LoopOptions, TaskSpec

# The gate z of the latent: learned, per feature ("element") or per token
# ("scalar"); or fixed, so that the latent is the mean of all loops' inputs so
# far, their exponential moving average, or the input of one loop.
GATES = ("element", "scalar", "mean", "ema", "last", "first")
LEARNED = ("element", "scalar")
DISTILL = ("all", "last", "none")


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """Hyper-parameters; the defaults are MELT-1.6B's.

  Those of `stack.StackConfig`, and:

  Attributes:
    norm_order: RMS norms of a block, "pre" or "branch" (Ouro), see
      `stack.NORM_ORDERS`.
    num_loops: K, number of loops in training.
    tied: whether the read-out uses the embedding table; else it has its own.
    exit_gate: "none"; or "unused": the gate of the model that the parameters
      come from, which is not trained further. It can be used for early exits.
    gate: how the latent is updated in each loop, one of GATES (section 4.4.1).
      The latent of the first loop is its input, whatever the gate.
    gate_bias: initial value of b_z, the log-odds of keeping the old latent.
    chunk_size: number of tokens processed in parallel in training; must divide
      the sequence length. 0 for the whole sequence.
    prefill_chunk: number of tokens processed in parallel where no gradient is
      needed; 1 gives the results of reading token by token. 0 for chunk_size.
    alpha: initial weight of the latent in keys and values, as opposed to the
      loop's own input, which a looped model uses (phase 1; section 3.3). It
      must rise: the model is evaluated and read with a weight of 1.
    interpolation_steps: number of steps over which alpha rises linearly to 1,
      at most run.num_steps.
    distill: loops whose read-outs learn those of run.teacher: "all" or "last";
      "none" for next-token prediction without a teacher.
    distill_beta: beta of the generalised Jensen-Shannon divergence; 0 gives
      KL(teacher || model), 1 gives KL(model || teacher).
    align_weight: weight of the mean squared distance between the attention
      outputs and the teacher's, over features, layers and loops (phase 2; the
      paper's beta, 0.1 of a sum over features).
  """

  width: int = 2048
  num_layers: int = 24
  num_heads: int = 16
  mlp: str = "swiglu"
  mlp_ratio: float = 2.75
  rope_base: float = 1e6
  precision: str = "bfloat16"
  norm_order: str = "branch"
  num_loops: int = checks.setting(4, least=1)
  tied: bool = False
  exit_gate: str = "none"
  gate: str = checks.setting("element", own=True)
  gate_bias: float = checks.setting(0.0, own=True)
  chunk_size: int = checks.setting(500, least=0)
  prefill_chunk: int = checks.setting(0, least=0)
  alpha: float = checks.setting(1.0, within="[0, 1]")
  interpolation_steps: int = checks.setting(0, least=0)
  distill: str = "all"
  distill_beta: float = checks.setting(0.5, within="[0, 1]")
  align_weight: float = checks.setting(0.0, least=0)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of(
      "model",
      self,
      exit_gate=("none", "unused"),
      gate=GATES,
      distill=DISTILL,
      norm_order=stack.INNER_NORMS,
    )
    if self.alpha < 1 and self.interpolation_steps < 2:
      raise UserError(
        f"model.alpha={self.alpha} needs model.interpolation_steps of at least"
        " 2: evaluation uses alpha=1"
      )
    self._check_effects()

  def _check_effects(self) -> None:
    """Raises UserError if a setting has no effect because of another one."""
    for field, values, unused in (
      ("alpha", (1.0,), ("interpolation_steps",)),
      ("distill", ("none",), ("distill_beta", "align_weight")),
      ("gate", set(GATES) - set(LEARNED), ("gate_bias",)),
    ):
      if getattr(self, field) in values:
        checks.without_effect("model", self, field, *unused)

  def read_chunk(self, spec: TaskSpec) -> int:
    """Number of tokens processed in parallel where no gradient is needed."""
    return self.prefill_chunk or self.chunk_size or spec.sequence_length

  def check_kernels(self, options: LoopOptions) -> None:
    """Raises UserError for settings whose computation has no kernel."""
    if options.kernels == "xla":
      return
    if self.alpha != 1:
      raise UserError(f"model.alpha={self.alpha} needs loop.kernels='xla'")

  def check_length(self, spec: TaskSpec) -> None:
    """Raises UserError unless chunk_size divides the sequence length."""
    if self.chunk_size and spec.sequence_length % self.chunk_size:
      raise UserError(
        f"model.chunk_size={self.chunk_size} does not divide the"
        f" {spec.sequence_length} tokens of a sequence; with 0, a sequence is"
        " one chunk"
      )


class Options(NamedTuple):
  """Static options of `algorithm.run`.

  Attributes:
    gate: one of GATES.
    num_loops: K.
    rope_base: longest wavelength over 2 pi, in tokens.
    kind, remat: how loops are executed, see `LoopOptions`.
    keep: records of every loop to return: "hidden", "attention", "inputs".
    chunk_size: C, which divides T; 0 for one chunk.
  """

  gate: str
  num_loops: int
  rope_base: float
  kind: driver.Kind = "scan"
  remat: str = "none"
  keep: tuple[str, ...] = ()
  chunk_size: int = 0


def made_from(source: Any) -> Start:
  """See `Family.made_from`; with alpha = 0 it computes what the source does."""
  return Start(starting.settings(source, Config), "^latent_gates/")


def check_schedule(config: Config, num_steps: int) -> None:
  """Raises UserError if alpha does not reach 1 within the run's steps."""
  if config.interpolation_steps > num_steps:
    raise UserError(
      f"model.interpolation_steps={config.interpolation_steps} is more than"
      f" run.num_steps={num_steps}: evaluation uses alpha=1"
    )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  The numbers count the computation without gradients, with gates in every
  loop, including the first, and attention of every chunk to the whole history,
  an upper bound: of long rows, early chunks read only the first entries
  (`loop.chunks`). The padding of a last chunk does not count.
  """
  checks.num_loops(
    config, num_loops, "more would change the keys and values of all tokens"
  )
  tokens, width = spec.sequence_length, config.width
  chunk = config.read_chunk(spec)
  num_own = chunk if chunk < tokens else 0  # Besides the tokens of the history.
  per_layer = block.flops(config.block_shape(), tokens, num_own)
  if config.gate in LEARNED:
    features = width if config.gate == "element" else 1
    per_layer += 4 * tokens * width * features
  head = 2 * tokens * width * spec.vocab_size
  per_loop = per_layer * config.num_layers
  return {"flops_per_example": block.flops_by_loop(head, per_loop, num_loops)}
