"""What an adaptive model is made of, and what it costs."""

import dataclasses

from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import memory
from loopjax.nn import block, norm
from loopjax.nn import shape as shape_lib
from loopjax.types import PRECISIONS, TaskSpec


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; defaults are the paper's with memory, where it says.

  Attributes:
    width: D. num_layers: L. num_heads: H.
    mlp: "gelu", "swiglu" or "geglu". mlp_ratio: F = floor(mlp_ratio D).
    norm: "layernorm", or "rmsnorm" as the other families have it.
    num_loops: N, iterations of every layer.
    loop_update: h + s_t Block(LN h), as equation 5 is printed ("literal"), or
      h + s_t (Block(h) - h), which is the block itself where s_t = 1 ("delta").
    loop_scale: alpha_t at first; s_t = softplus(alpha_t).
    scale_from_step: first t with an alpha_t; s_t = 1 before.
    halting_mass: what the router leaves after N iterations goes to the last
      one ("remainder"), is lost, as equation 4 is printed ("printed"), or is
      shared out in proportion ("renormalised").
    num_local_slots: M_L, of each layer's bank; 0 for none.
    num_global_slots: M_G, of the bank that all layers share; 0 for none.
    memory_placement: the banks are read in every iteration ("in_loop"), once
      before the first one ("pre_layer"), or once after the last ("post_layer").
    memory_gate: one gate a feature ("vector") or one a token ("scalar").
    gate_bias: b_g at first; the paper takes -3, 0 and 3.
    ponder_weight: lambda of equation 11.
    ponder_prior: what lambda weighs. 0: the expected number of iterations
      (equation 12). In (0, 1): lambda_p of PonderNet (arXiv 2107.05407,
      equation 8), the divergence of the halting distribution from a geometric
      one, truncated after N iterations.
    z_weight: of the mean squared log normaliser of the read-out.
    tied: one table encodes and decodes.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix and bank, the embedding table included.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 768
  num_layers: int = 12
  num_heads: int = 12
  mlp: str = "gelu"
  mlp_ratio: float = 4.0
  norm: str = "layernorm"
  num_loops: int = 3
  loop_update: str = "literal"
  loop_scale: float = -7.0
  scale_from_step: int = 1
  halting_mass: str = "remainder"
  num_local_slots: int = 1024
  num_global_slots: int = 512
  memory_placement: str = "in_loop"
  memory_gate: str = "vector"
  gate_bias: float = 0.0
  ponder_weight: float = 0.0
  ponder_prior: float = 0.0
  z_weight: float = 0.0
  tied: bool = False
  rope_base: float = 10_000.0
  init_std: float = 0.02
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      norm=("layernorm", "rmsnorm"),
      loop_update=("literal", "delta"),
      halting_mass=("remainder", "printed", "renormalised"),
      memory_placement=("in_loop", "pre_layer", "post_layer"),
      memory_gate=memory.GATES,
      precision=PRECISIONS,
    )
    checks.at_least("model", self, num_loops=1, num_layers=1, scale_from_step=1)
    checks.at_least("model", self, num_local_slots=0, num_global_slots=0)
    checks.at_least("model", self, rope_base=1, init_std=0)
    checks.at_least("model", self, ponder_weight=0, z_weight=0)
    if not (self.num_local_slots or self.num_global_slots):
      of_memory = ("memory_placement", "memory_gate", "gate_bias")
      checks.without_effect("model", self, "there are no slots", *of_memory)
    if self.scale_from_step > self.num_loops:
      because = f"model.scale_from_step is over {self.num_loops} loops"
      checks.without_effect("model", self, because, "loop_scale")
    self._check_prior()
    if self.num_loops == 1:
      because = "model.num_loops=1"
      idle = ("ponder_weight", "halting_mass")
      checks.without_effect("model", self, because, *idle)
    self.block_shape()

  def _check_prior(self) -> None:
    """Raises UserError unless halting can be compared with the prior."""
    if not 0 <= self.ponder_prior < 1:
      raise UserError(
        f"model.ponder_prior={self.ponder_prior} must be in [0, 1)"
      )
    if not self.ponder_weight:
      because = "model.ponder_weight=0"
      checks.without_effect("model", self, because, "ponder_prior")
    if self.ponder_prior and self.halting_mass != "remainder":
      raise UserError(
        f"model.ponder_prior={self.ponder_prior} needs"
        " model.halting_mass=remainder, whose weights are a distribution"
      )

  def block_shape(self) -> shape_lib.Shape:
    """What a layer repeats; raises UserError if there is no such block."""
    return shape_lib.Shape(
      self.width,
      self.num_heads,
      num_key_value_heads=self.num_heads,
      head_width=shape_lib.head_width(self.width, self.num_heads),
      mlp_width=shape_lib.mlp_width(self.width, self.mlp_ratio),
      mlp=self.mlp,
      norm=norm.NORMS[self.norm],
      causal=True,
      init=nnx.initializers.normal(self.init_std),
    )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by iteration.

  A multiply-add counts as two; point-wise operations are left out.

  Raises:
    UserError: there is no alpha_t for so many iterations.
  """
  check_loops(config, num_loops)
  tokens, width, shape = (
    spec.sequence_length,
    config.width,
    config.block_shape(),
  )
  read = tokens * sum(
    memory.read_flops(width, slots, config.memory_gate)
    for slots in (config.num_local_slots, config.num_global_slots)
  )
  router = tokens * 2 * (width + 1) if config.num_loops > 1 else 0
  in_loop = config.memory_placement == "in_loop"
  per_loop = block.flops(shape, tokens) + router + (read if in_loop else 0)
  once = 0 if in_loop else read
  head = 2 * tokens * width * spec.vocab_size
  return {
    "flops_per_example": [
      head + config.num_layers * (once + per_loop * (loop + 1))
      for loop in range(num_loops)
    ],
  }


def check_loops(config: Config, num_loops: int) -> None:
  """Raises UserError unless there is an alpha_t for so many iterations."""
  if not 1 <= num_loops <= config.num_loops:
    raise UserError(
      f"num_loops={num_loops} must be 1 to {config.num_loops}: there is one"
      " alpha_t for every iteration that was trained"
    )
