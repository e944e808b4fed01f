"""Both phases of MELT's training: a looped model as start and as teacher.

Section 3.3 of arXiv 2605.07721. Phase 1 (interpolated transition): keys and
values go from the teacher's kind to the latent's, and every loop's read-out
learns the teacher's of the same loop. Phase 2 (attention-aligned distillation):
the same with the latent alone, and attention outputs learn the teacher's.
"""

from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.losses import distill
from loopjax.losses import tokens as token_losses
from loopjax.models import looped
from loopjax.models.melt import passes
from loopjax.models.melt.config import Config
from loopjax.models.melt.layer import Layer
from loopjax.models.melt.model import Model
from loopjax.protocols import Frozen, Teacher
from loopjax.types import PRECISIONS, Array, Batch, Metrics, TaskSpec


def check_teacher(
  config: Config, spec: TaskSpec, teacher: Teacher | None
) -> None:
  """Raises UserError unless the teacher is a looped model of this shape."""
  del spec
  if config.distill == "none":
    if teacher is not None:
      raise UserError("it has no effect while model.distill='none'")
    return
  if teacher is None:
    raise UserError(
      f"model.distill={config.distill!r} needs run.teacher, the work directory"
      " of a looped model; model.distill=none learns without one"
    )
  theirs = teacher.model
  if not isinstance(theirs, looped.Config):
    raise UserError("its model is not of the family looped")
  if theirs.loop_norm != "per_loop" or theirs.qk_norm:
    raise UserError(
      "its loops must end in a norm and its keys must have none:"
      f" loop_norm={theirs.loop_norm!r}, qk_norm={theirs.qk_norm}"
    )
  same = ["num_loops"] if config.distill == "all" else []
  same += ["num_loops", "num_layers", "width"] if config.align_weight else []
  for name in dict.fromkeys(same):
    if getattr(theirs, name) != getattr(config, name):
      raise UserError(
        f"its {name} is {getattr(theirs, name)}, model.{name} is"
        f" {getattr(config, name)}"
      )


def alpha_at(config: Config, step: Array) -> Array | None:
  """The latent's share in keys and values; None where it is always 1.

  Linear in the step, and 1 from the last of `interpolation_steps` on.
  """
  if config.alpha == 1:
    return None
  if not config.interpolation_steps:
    return jnp.full((), config.alpha, jnp.float32)
  done = step.astype(jnp.float32) / (config.interpolation_steps - 1)
  return config.alpha + (1.0 - config.alpha) * jnp.minimum(done, 1.0)


def loss(
  model: Model, batch: Batch, key: Array, step: Array, frozen: Frozen
) -> tuple[Array, Metrics]:
  """Distillation, and the alignment of attention, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  config, tokens = model.config, batch["inputs"]
  teacher: Any = frozen
  reads: dict[str, Any] = {
    "num_padding_tokens": model.spec.num_padding_tokens,
    "precision": PRECISIONS[config.precision],
  }
  learns = config.distill != "none"
  taught = taught_by(frozen, config, batch) if learns else {}
  offset = None
  if config.chunk_jitter:
    offset = jax.random.randint(key, (), 0, config.chunk_size)
  rows = _Shift(offset, config.chunk_size)
  plan = model.plan(keep=("hidden",) if config.distill == "all" else ())
  alpha, attention = alpha_at(config, step), taught.get("attention")
  hidden, records = passes.run(
    model.stack(),
    plan._replace(
      chunk_size=config.chunk_size,
      reach=config.history_reach,
      hops=config.history_hops,
      sweeps=config.sweeps,
    ),
    model.token_embedding(rows.put(tokens, 1)),
    documents=rows.documents(batch.get("documents"), tokens),
    alpha=alpha,
    attention=None if attention is None else rows.put(attention, 3),
  )
  table = model.readout_table()
  metrics = {"hidden_norm": records["hidden_norm"]}
  metrics |= {} if alpha is None else {"alpha": alpha}
  hidden = rows.take(hidden, 1)
  if not learns:
    total, _ = token_losses.next_token(hidden, table, batch, **reads)
    return total, {"loss": total, **metrics}
  by_loop = hidden[None]
  if config.distill == "all":
    by_loop = rows.take(records["hidden"], 2)
  divergence = distill.by_loop(
    by_loop,
    table,
    taught["hidden"][-len(by_loop) :],
    teacher.readout_table(),
    batch,
    beta=config.distill_beta,
    **reads,
  )
  total = jnp.mean(divergence)
  metrics |= {"distill": divergence}
  if config.align_weight:
    apart = rows.take(records["apart"], 3)
    align = token_losses.weighted_mean(
      jnp.mean(apart, axis=(0, 1)), batch["weights"], batch.get("mean_weight")
    )
    total += config.align_weight * align
    metrics |= {"align": align}
  return total, {"loss": total, **metrics}


def taught_by(frozen: Any, config: Config, batch: Batch) -> dict[str, Array]:
  """A looped model's "hidden" [K, B, T, D] and, to align, its "attention".

  "attention" is [K, L, B, T, D], before any norm.
  """
  keep = ("hidden", "attention") if config.align_weight else ("hidden",)
  theirs = frozen.config
  plan = passes.Plan("last", theirs.num_loops, theirs.rope_base, keep=keep)
  stack = passes.Stack(Layer(frozen.layers, None), frozen.final_norm)
  _, records = passes.run(
    stack,
    plan,
    frozen.token_embedding(batch["inputs"]),
    documents=batch.get("documents"),
  )
  return jax.lax.stop_gradient(records)


class _Shift:
  """Rows with up to a chunk of empty tokens before them, or as they are.

  The empty tokens are a document of their own, so that nothing sees them.
  """

  def __init__(self, offset: Array | None, chunk_size: int):
    self.offset, self.room = offset, chunk_size

  def put(self, x: Array, axis: int) -> Array:
    """x with `room` more tokens along an axis."""
    return self._put(x, axis, 0)

  def _put(self, x: Array, axis: int, filler: int) -> Array:
    if self.offset is None:
      return x
    shape = (*x.shape[:axis], x.shape[axis] + self.room, *x.shape[axis + 1 :])
    whole = jnp.full(shape, filler, x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, x, self.offset, axis)

  def take(self, x: Array, axis: int) -> Array:
    """The inverse of `put`."""
    if self.offset is None:
      return x
    size = x.shape[axis] - self.room
    return jax.lax.dynamic_slice_in_dim(x, self.offset, size, axis)

  def documents(self, documents: Array | None, tokens: Array) -> Array | None:
    """Of the longer rows; -1 for what is empty."""
    if self.offset is None:
      return documents
    if documents is None:
      documents = jnp.ones_like(tokens)
    return self._put(documents, 1, -1)
