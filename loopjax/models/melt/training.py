"""The two phases of MELT's training, with a looped model as teacher.

Section 3.3 of arXiv 2605.07721. The model starts from the teacher's parameters.
Phase 1 (interpolated transition): the input of keys and values changes linearly
from the looped model's to the latent, and the read-out after every loop
learns the teacher's after the same loop. Phase 2 (attention-aligned
distillation): keys and values depend on the latent only, and the attention
outputs also learn the teacher's. Phase 1 is `alpha=0` with
`interpolation_steps`, phase 2 an `align_weight` above 0; each is a run of its
own (sweep `pipeline` of `configs/lm_melt.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.losses import distill
from loopjax.losses import tokens as token_losses
from loopjax.models import starting
from loopjax.models.melt import algorithm
from loopjax.models.melt.config import Config, Options
from loopjax.models.melt.model import Model
from loopjax.models.melt.parameters import Layer, Stack
from loopjax.protocols import Teacher
from loopjax.types import Array, Batch, Metrics


def check_teacher(config: Config, teacher: Teacher | None) -> None:
  """Raises UserError unless the teacher is a looped model that `run` can run.

  It must also have the shape that the loss compares.
  """
  if config.distill == "none":
    if teacher is not None:
      raise UserError("it has no effect with model.distill='none'")
    return
  if teacher is None:
    raise UserError(
      f"model.distill={config.distill!r} needs run.teacher, the work directory"
      " of a looped model; model.distill=none trains without a teacher"
    )
  teacher_config: Any = teacher.model
  starting.check(teacher_config, Config)
  equal = ["num_loops"] if config.distill == "all" else []
  equal += ["num_loops", "num_layers", "width"] if config.align_weight else []
  for name in dict.fromkeys(equal):
    if getattr(teacher_config, name) != getattr(config, name):
      raise UserError(
        f"its {name} is {getattr(teacher_config, name)}, model.{name} is"
        f" {getattr(config, name)}"
      )


def alpha_at(config: Config, step: Array) -> Array | None:
  """The weight alpha of the latent in keys and values; None if it is always 1.

  It rises linearly with the step and reaches 1 at the last of
  `interpolation_steps`.
  """
  if config.alpha == 1:
    return None
  done = step.astype(jnp.float32) / (config.interpolation_steps - 1)
  return config.alpha + (1.0 - config.alpha) * jnp.minimum(done, 1.0)


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: Any
) -> tuple[Array, Metrics]:
  """The distillation loss, plus the attention alignment loss of phase 2.

  Both are weighted by token. The divergence replaces the cross-entropy, which
  is the loss without distillation. The alignment is a mean over features, where
  the paper has a sum.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del key  # Nothing is drawn.
  config, tokens = model.config, batch["inputs"]
  learns = config.distill != "none"
  targets = teacher_outputs(teacher, config, batch) if learns else {}
  options = model.pass_options(
    keep=("hidden",) if config.distill == "all" else ()
  )
  alpha, attention = alpha_at(config, step), targets.get("attention")
  hidden, records = algorithm.run(
    model.stack(),
    options._replace(chunk_size=config.chunk_size),
    model.token_embedding(tokens),
    documents=batch.get("documents"),
    alpha=alpha,
    attention=attention,
  )
  metrics = {"hidden_norm": records["hidden_norm"]}
  metrics |= {} if alpha is None else {"alpha": alpha}
  if not learns:
    total = token_losses.next_token(model, hidden, batch)
    return total, metrics
  by_loop = records["hidden"] if config.distill == "all" else hidden[None]
  divergence = distill.by_loop(
    model,
    by_loop,
    teacher,
    targets["hidden"][-len(by_loop) :],
    batch,
    config.distill_beta,
  )
  total = jnp.mean(divergence)
  metrics |= {"distill": divergence}
  if config.align_weight:
    distance = jnp.mean(records["squared_distance"], axis=(0, 1))
    align = token_losses.batch_mean(distance, batch)
    total += config.align_weight * align
    metrics |= {"align": align}
  return total, metrics


def teacher_outputs(
  teacher: Any, config: Config, batch: Batch
) -> dict[str, Array]:
  """The teacher's outputs of every loop, without gradient.

  "hidden" [K, B, T, D] and, if there is an alignment loss, "attention", the
  outputs of attention before any norm, [K, L, B, T, D].
  """
  keep = ("hidden", "attention") if config.align_weight else ("hidden",)
  teacher_config = teacher.config
  num_loops, rope_base = teacher_config.num_loops, teacher_config.rope_base
  options = Options("last", num_loops, rope_base, keep=keep)
  stack = Stack(Layer(teacher.layers, None), teacher.final_norm)
  _, records = algorithm.run(
    stack,
    options,
    teacher.token_embedding(batch["inputs"]),
    documents=batch.get("documents"),
  )
  return jax.lax.stop_gradient(records)
