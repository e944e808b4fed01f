"""The settings of UTM, and its FLOPs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from loopjax import checks
from loopjax.errors import Moot, UserError
from loopjax.loop import halting
from loopjax.nn import block, norm, rope, shape
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, TaskSpec


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the paper's (section 4.1).

  Those marked "code" are from the authors' code, the paper does not state them.

  Attributes:
    width: D.
    num_heads: H.
    mlp_ratio: F = floor(mlp_ratio D).
    num_loops: K, number of steps in training.
    num_memory_tokens: M (T in the paper), learned tokens before the cells.
    norm: "derf_utm" (the paper), "derf", "rmsnorm" or "layernorm".
    positions: rotary positions. "overlap": memory 0 .. M - 1 and cells
      0 .. T - 1 (code); "offset": cells M .. M + T - 1; "grid": the task's
      coordinates, on a board (row, column, box); "none": no rotation.
    rope_base: longest wavelength over 2 pi, in tokens.
    halting: "act" (the paper); "ponder" (PonderNet); or "fixed": the output of
      the last step. Settings that the rule does not use must keep their
      defaults.
    router_bias: initial bias of the router; -3 is the paper's deep start.
    epsilon: a token halts when its cumulative probability reaches 1 - epsilon
      (code).
    freeze: the state of a halted token: from before its last step ("pre",
      code), from after it ("post"), or updated further ("none").
    ponder_weight: lambda, weight of the ponder cost.
    ponder_warmup_steps: number of steps over which lambda rises linearly.
    precision: "float32" or "bfloat16", the dtype of matrix products.
  """

  width: int = 512
  num_heads: int = 8
  mlp_ratio: float = 8 / 3
  num_loops: int = checks.setting(18, least=1)
  num_memory_tokens: int = checks.setting(16, least=0)
  norm: str = checks.setting("derf_utm", own=True)
  positions: str = "overlap"
  rope_base: float = checks.setting(10_000.0, least=1)
  halting: str = "act"
  router_bias: float = -3.0
  epsilon: float = checks.setting(0.05, within="(0, 1)", own=True)
  freeze: str = "pre"
  ponder_weight: float = checks.setting(0.0, least=0)
  ponder_warmup_steps: int = checks.setting(0, least=0)
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      norm=norm.NORMS,
      positions=rope.POSITIONS,
      halting=HALTING,
      freeze=("pre", "post", "none"),
      precision=PRECISIONS,
    )
    self.block_shape()
    disabled: dict[str, tuple[str, ...]] = {}
    act = ("epsilon", "freeze")
    if self.halting == "ponder":
      disabled["halting"] = act
    if self.halting == "fixed":
      disabled["halting"] = (*act, "router_bias", "ponder_weight")
    if not self.ponder_weight:
      disabled["ponder_weight"] = ("ponder_warmup_steps",)
    if self.positions == "none":
      disabled["positions"] = ("rope_base",)
    for because, fields in disabled.items():
      checks.without_effect("model", self, because, *fields)

  def block_shape(self) -> Shape:
    """Structure of the block (section 2.1); raises UserError if invalid."""
    return shape.multi_head(
      self.width,
      self.num_heads,
      self.mlp_ratio,
      norm=norm.NORMS[self.norm],
      qk_norm=norm.rms_norm,
    )


HALTING: dict[str, Callable[[Config], Any]] = {
  "act": lambda config: halting.ACT(config.epsilon),
  "ponder": lambda _: halting.PonderNet(),
  "fixed": lambda _: halting.FixedSteps(),
}


def check_schedule(config: Config, num_steps: int) -> None:
  """See `Family.check_schedule`."""
  if config.ponder_warmup_steps >= num_steps:
    raise UserError(
      f"model.ponder_warmup_steps={config.ponder_warmup_steps} must be less"
      f" than run.num_steps={num_steps}",
      (Moot("model.ponder_warmup_steps", num_steps // 3, ("run.num_steps",)),),
    )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops."""
  tokens = config.num_memory_tokens + spec.sequence_length
  router = 0 if config.halting == "fixed" else 2 * tokens * config.width
  per_loop = block.flops(config.block_shape(), tokens) + router
  head = 2 * spec.sequence_length * config.width * spec.vocab_size
  return {"flops_per_example": block.flops_by_loop(head, per_loop, num_loops)}
