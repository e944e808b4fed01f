"""Learning-rate schedule, weight-decay mask and the optimizer chain."""

import dataclasses
from typing import Any

import jax
import optax

from loopjax import checks
from loopjax.errors import UserError

# Parts of the paths of parameters that are no matrices of a linear map.
_NOT_DECAYED = ("embedding", "_type", "memory_tokens", "norm")


@dataclasses.dataclass(frozen=True)
class Config:
  """AdamW; the defaults are UTM's (section 4.1 and the authors' code).

  Attributes:
    learning_rate: peak. final_learning_rate: at the last step.
    schedule: after the warm-up "cosine" to the final rate, or "constant".
    warmup_steps: linear from 0, counted inside the run's steps.
    b1, b2, eps: of Adam.
    weight_decay: decoupled (AdamW).
    decay: what decays: "all" parameters, biases and embeddings included (UTM),
      or "matrices" alone, the kernels of linear maps.
    clip_norm: gradients are scaled down to this global norm; 0 for none.
    ema_decay: of the averaged parameters that evaluation uses; 0 for none.
  """

  learning_rate: float = 3e-4
  final_learning_rate: float = 1e-5
  schedule: str = "cosine"
  warmup_steps: int = 1000
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  decay: str = "all"
  clip_norm: float = 1.0
  ema_decay: float = 0.999

  def __post_init__(self) -> None:
    checks.plain_values("optim", self)
    checks.one_of(
      "optim",
      self,
      schedule=("cosine", "constant"),
      decay=("all", "matrices"),
    )
    checks.at_least(
      "optim",
      self,
      warmup_steps=0,
      weight_decay=0,
      clip_norm=0,
      final_learning_rate=0,
    )
    for field in ("learning_rate", "eps"):
      if not getattr(self, field) > 0:
        raise UserError(f"optim.{field}={getattr(self, field)} must be > 0")
    if self.schedule == "constant":
      checks.without_effect(
        "optim", self, "optim.schedule='constant'", "final_learning_rate"
      )
    for field in ("b1", "b2", "ema_decay"):
      if not 0 <= getattr(self, field) < 1:
        raise UserError(
          f"optim.{field}={getattr(self, field)} must be in [0, 1)"
        )


def make_schedule(config: Config, num_steps: int) -> optax.Schedule:
  """Step (from 0) -> learning rate."""
  if config.warmup_steps >= num_steps and config.schedule == "cosine":
    raise UserError(
      f"optim.warmup_steps={config.warmup_steps} must be less than"
      f" run.num_steps={num_steps}"
    )
  if config.schedule == "cosine":
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=config.learning_rate,
      warmup_steps=config.warmup_steps,
      decay_steps=num_steps,
      end_value=config.final_learning_rate,
    )
  return optax.linear_schedule(
    0.0 if config.warmup_steps else config.learning_rate,
    config.learning_rate,
    max(config.warmup_steps, 1),
  )


def decay_mask(params: Any, decay: str) -> Any:
  """bool per parameter: whether weight decay applies to it."""

  def decays(path, leaf) -> bool:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    excluded = any(part in name for part in _NOT_DECAYED)
    return decay == "all" or (leaf.ndim >= 2 and not excluded)

  return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(
  config: Config, num_steps: int
) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW with the schedule and the mask."""
  adamw = optax.adamw(
    make_schedule(config, num_steps),
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=lambda params: decay_mask(params, config.decay),
  )
  if not config.clip_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
