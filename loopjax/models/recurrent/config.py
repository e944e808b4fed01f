"""The settings of recurrent depth, and its FLOPs."""

import dataclasses

import numpy as np

from loopjax import checks
from loopjax.errors import Moot, UserError
from loopjax.loop import depth as depth_lib
from loopjax.loop import injection
from loopjax.nn import block, stack
from loopjax.types import TaskSpec

LOOP_NORMS = ("final_only", "plain", "per_loop", "coda")
STATES = ("input", "zero", "normal")
UPDATES = ("replace", "gate", "damped")
# The settings that belong together; the others are at the top level.
GROUPS = {
  "attention": (
    "num_key_value_heads", "head_width", "qk_norm", "qk_bias", "value_bias",
  ),
  "norms": ("norm_order", "loop_norm", "prelude_norm", "norm_epsilon"),
  "injection": ("injection", "anchor_scale"),
  "state": ("state", "state_std", "update"),
  "depth": (
    "depth", "calibrated", "max_loops", "depth_per", "growth_steps",
    "growth_loops",
  ),
  "gradient": ("num_with_gradient",),
  "sharing": ("relaxed_rank",),
  "embedding": ("input_scale", "tied"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """Hyper-parameters; the defaults are Huginn's (arXiv 2502.05171).

  Those of `stack.StackConfig`, where `num_layers` counts the core's layers,
  and, by the mechanisms in `GROUPS`:

  Attributes:
    num_prelude, num_coda: layers that run once before the loops and after them.
    num_loops: K, number of loops in evaluation; in training, the mean of
      `depth`.
    dropout: dropout rate on embeddings and on the outputs of attention and MLP,
      in training.
    qk_norm: whether each head's queries and keys have an RMS norm, before the
      rotation.
    qk_bias: whether queries and keys have a bias, before the rotation.
    value_bias: whether values have one.
    norm_order: RMS norms of a block, see `stack.NORM_ORDERS`.
    loop_norm: norm after every loop: "final_only": none but the read-out's;
      "plain", without a gain; and the norm of the read-out "per_loop" (Ouro)
      or, once, before the "coda" (Huginn).
    prelude_norm: whether the prelude ends with an RMS norm (Parcae).
    injection: how the prelude's output enters every loop, see
      `loop.injection`.
    anchor_scale: alpha of "anchor": after every loop alpha e is added.
    state: the state before the first loop: the "input" of the loops, "zero", or
      "normal", drawn for each row and position. In evaluation and generation
      the draw depends only on the position in the document.
    state_std: standard deviation of "normal", before the truncation at three of
      them.
    update: the state after a loop: "replace": the core's output; "gate": from
      the second loop on, the old state moves towards it by a learned share of
      each feature, initially 0; "damped": h + (core(h) - h) / K.
    depth: distribution of the loops in training, see `loop.depth`.
    calibrated: whether the mean depth is exactly K; otherwise the mean of
      "poisson_lognormal" is K + 1, as in Huginn.
    max_loops: maximum of the sampled depth; 0 for none.
    depth_per: one draw for each "step", or for each "row" of its batch.
    growth_steps, growth_loops: a fixed depth that grows: growth_loops[i] loops
      before step growth_steps[i], then K.
    num_with_gradient: b, number of last loops with a gradient; 0 for all.
    relaxed_rank: rank of what each of the K loops adds to every matrix of the
      core, see `loop.relaxed`; 0: all loops have the same parameters.
    input_scale: factor of embedded tokens.
    tied: whether the output layer uses the embedding table or a separate one.
  """

  num_prelude: int = checks.setting(2, least=0)
  num_coda: int = checks.setting(2, least=0)
  num_loops: int = checks.setting(32, least=1)
  dropout: float = 0.0
  qk_norm: bool = False
  qk_bias: bool = False
  value_bias: bool = False
  norm_order: str = "sum"
  loop_norm: str = checks.setting("coda", own=True)
  prelude_norm: bool = False
  injection: str = "linear"
  anchor_scale: float = 1.0
  state: str = "normal"
  state_std: float = checks.setting(0.632, least=0)
  update: str = "replace"
  depth: str = "poisson_lognormal"
  calibrated: bool = False
  max_loops: int = checks.setting(0, least=0)
  depth_per: str = "step"
  growth_steps: tuple[int, ...] = ()
  growth_loops: tuple[int, ...] = ()
  num_with_gradient: int = checks.setting(8, least=0)
  relaxed_rank: int = checks.setting(0, least=0)
  input_scale: float = checks.setting(1.0, above=0)
  tied: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of(
      "model",
      self,
      norm_order=stack.NORM_ORDERS,
      injection=injection.INJECTIONS,
      loop_norm=LOOP_NORMS,
      state=STATES,
      update=UPDATES,
      depth=depth_lib.DEPTHS,
      depth_per=("step", "row"),
    )
    injection.check(self.injection)
    drawn = ("calibrated", "max_loops", "depth_per")
    growth = ("growth_steps", "growth_loops")
    for setting, others, holds in (
      ("depth", drawn, self.depth == "fixed"),
      ("depth", growth, self.depth != "fixed"),
      ("injection", ("anchor_scale",), self.injection != "anchor"),
      ("state", ("state_std",), self.state != "normal"),
    ):
      if holds:
        checks.without_effect("model", self, setting, *others)
    depth_lib.check_growth(self.growth_steps, self.growth_loops)
    adds_input = self.injection != "none" and (
      self.injection != "anchor" or self.anchor_scale
    )
    if self.state != "input" and not adds_input:
      raise UserError(
        f"model.state={self.state!r} needs an injection: with"
        f" model.injection={self.injection!r} no loop reads the tokens",
        (Moot("model.state", "input", ("model.injection",)),),
      )
    if self.max_loops and self.max_loops < self.num_loops:
      raise UserError(
        f"model.max_loops={self.max_loops} is less than"
        f" model.num_loops={self.num_loops}"
      )
    if self.calibrated and self.max_loops == self.num_loops:
      raise UserError(
        f"model.max_loops={self.max_loops} allows no distribution with a mean"
        f" of model.num_loops={self.num_loops}"
      )
    if self.relaxed_rank and self.depth != "fixed":
      raise UserError(
        f"model.relaxed_rank={self.relaxed_rank} needs model.depth='fixed'",
        (Moot("model.depth", "fixed", ("model.relaxed_rank",)),),
      )
    self.check_loops(max(self.growth_loops, default=1))
    if self.loop_norm == "coda" and not self.num_coda:
      raise UserError(
        "model.loop_norm='coda' needs model.num_coda of at least 1"
      )

  def check_loops(self, num_loops: int) -> None:
    """Raises UserError if there is no difference for so many loops."""
    if self.relaxed_rank and num_loops > self.num_loops:
      raise UserError(
        f"{num_loops} loops are more than model.num_loops={self.num_loops}:"
        f" with model.relaxed_rank={self.relaxed_rank} each has parameters of"
        " its own"
      )

  def depths(self) -> np.ndarray:
    """The distribution of the loops in training, see `depth.probabilities`."""
    mean: float = self.num_loops
    if self.calibrated:
      mean = depth_lib.calibrated(self.depth, mean, self.max_loops)
    return depth_lib.probabilities(self.depth, mean, self.max_loops)


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  Also FLOPs of a training step: three forward passes for parts with a gradient,
  one for parts without; the mean over depths.

  The sums of `loop.relaxed`, once for all tokens, are not counted.
  """
  config.check_loops(num_loops)
  shape, tokens = config.block_shape(), spec.sequence_length
  layer = block.flops(shape, tokens)
  once = (config.num_prelude + config.num_coda) * layer
  once += 2 * tokens * config.width * spec.vocab_size
  products = injection.INJECTIONS[config.injection].num_products
  loop = config.num_layers * layer + 2 * products * tokens * config.width**2
  pmf = config.depths()
  all_loops = depth_lib.expected(pmf)
  last = config.num_with_gradient
  with_gradient = depth_lib.expected(pmf, last) if last else all_loops
  return {
    "flops_per_example": block.flops_by_loop(once, loop, num_loops),
    "training_flops_per_example": round(
      3 * once + loop * (all_loops + 2 * with_gradient)
    ),
  }
