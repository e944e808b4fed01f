"""The settings of adaptive models, and their FLOPs."""

import dataclasses
import functools

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import memory
from loopjax.nn import block, norm, stack
from loopjax.nn.shape import Shape
from loopjax.types import TaskSpec

WHY_NO_MORE = "every iteration has its own alpha_t"
_NORMS = {"layernorm": norm.layer_norm, "rmsnorm": norm.rms_norm}


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """Hyper-parameters; the defaults are the paper's model with memory.

  Those of `stack.StackConfig`, where init_std also applies to the banks, and:

  Attributes:
    norm: "layernorm" (the paper), or "rmsnorm" as in the other families.
    num_loops: N, maximum number of iterations of every layer.
    loop_update: "literal": h + s_t Block(LN h), as printed in equation 5;
      "delta": h + s_t (Block(h) - h), which is Block(h) if s_t = 1.
    loop_scale: initial value of alpha_t; s_t = softplus(alpha_t).
    scale_from_step: first t with an alpha_t; before it s_t = 1.
    halting_mass: the halting probability that remains after N iterations:
      "remainder": the last iteration gets it; "printed": it is lost, as in
      equation 4; "renormalised": the weights are divided by their sum.
    num_local_slots: M_L, slots of the memory bank of each layer; 0 for no bank.
    num_global_slots: M_G, slots of the bank that all layers share; 0 for no
      bank.
    memory_placement: when a layer reads the banks: in every iteration
      ("in_loop"), once before the first ("pre_layer"), or once after the last
      ("post_layer").
    memory_gate: one gate per feature ("vector") or per token ("scalar").
    gate_bias: initial value of b_g; the paper uses -3, 0 and 3.
    ponder_weight: lambda of equation 11.
    ponder_prior: the penalty that lambda weights. 0: the expected number of
      iterations (equation 12). In (0, 1): the KL divergence of the halting
      distribution from a geometric distribution with this parameter, truncated
      after N iterations (lambda_p of PonderNet, arXiv 2107.05407, equation 8).
    tied: whether the output layer uses the embedding table or a separate one.
  """

  num_layers: int = 12
  norm: str = checks.setting("layernorm", own=True)
  num_loops: int = checks.setting(3, least=1)
  loop_update: str = "literal"
  loop_scale: float = -7.0
  scale_from_step: int = checks.setting(1, least=1)
  halting_mass: str = "remainder"
  num_local_slots: int = checks.setting(1024, least=0)
  num_global_slots: int = checks.setting(512, least=0)
  memory_placement: str = "in_loop"
  memory_gate: str = "vector"
  gate_bias: float = checks.setting(0.0, own=True)
  ponder_weight: float = checks.setting(0.0, least=0)
  ponder_prior: float = checks.setting(0.0, within="[0, 1)")
  tied: bool = False

  def __post_init__(self) -> None:
    checks.one_of("model", self, norm=_NORMS)
    super().__post_init__()
    checks.one_of(
      "model",
      self,
      loop_update=("literal", "delta"),
      halting_mass=("remainder", "printed", "renormalised"),
      memory_placement=("in_loop", "pre_layer", "post_layer"),
      memory_gate=memory.GATES,
    )
    if not (self.num_local_slots or self.num_global_slots):
      memory_fields = ("memory_placement", "memory_gate", "gate_bias")
      slots = ("num_local_slots", "num_global_slots")
      checks.without_effect("model", self, slots, *memory_fields)
    if self.scale_from_step > self.num_loops:
      cause = ("scale_from_step", "num_loops")
      checks.without_effect("model", self, cause, "loop_scale")
    self._check_prior()
    if self.num_loops == 1:
      unused = ("ponder_weight", "halting_mass")
      checks.without_effect("model", self, "num_loops", *unused)

  def _check_prior(self) -> None:
    """Raises UserError for a prior that is invalid or has no effect."""
    if not self.ponder_weight:
      checks.without_effect("model", self, "ponder_weight", "ponder_prior")
    if self.ponder_prior and self.halting_mass != "remainder":
      raise UserError(
        f"model.ponder_prior={self.ponder_prior} needs"
        " model.halting_mass=remainder, for which the weights sum to 1"
      )

  def block_shape(self) -> Shape:
    """Structure of the blocks; raises UserError if it is invalid."""
    make_norm = functools.partial(_NORMS[self.norm], epsilon=self.norm_epsilon)
    return dataclasses.replace(super().block_shape(), norm=make_norm)


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of iterations."""
  checks.num_loops(config, num_loops, WHY_NO_MORE)
  tokens, width = spec.sequence_length, config.width
  read_flops = tokens * sum(
    memory.read_flops(width, slots, config.memory_gate)
    for slots in (config.num_local_slots, config.num_global_slots)
  )
  router = tokens * 2 * (width + 1) if config.num_loops > 1 else 0
  in_loop = config.memory_placement == "in_loop"
  per_loop = block.flops(config.block_shape(), tokens) + router
  per_loop += read_flops if in_loop else 0
  once = 2 * tokens * width * spec.vocab_size
  once += 0 if in_loop else config.num_layers * read_flops
  by_loop = block.flops_by_loop(once, config.num_layers * per_loop, num_loops)
  return {"flops_per_example": by_loop}
