"""A family for tests that learns from a teacher and carries state.

One embedding and one read-out. Its targets are the teacher's outputs and its
own outputs for the same rows of earlier batches, which makes every step depend
on all earlier steps.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.nn import linear
from loopjax.protocols import Family
from loopjax.types import PRECISIONS, Carried, LoopOptions, Output


@dataclasses.dataclass(frozen=True)
class Config:
  width: int = 8
  num_loops: int = 1
  precision: str = "float32"


class Model(nnx.Module):
  def __init__(self, config, spec, options=LoopOptions(), *, rngs):
    shared = {"precision": PRECISIONS["float32"], "rngs": rngs}
    self.token_embedding = linear.embedding(
      spec.vocab_size, config.width, **shared
    )
    self.head = linear.readout(config.width, spec.vocab_size, **shared)

  def __call__(self, inputs, *, num_loops=None, kind=None, trace=()):
    logits = self.head(self.token_embedding(inputs))
    stats = {"loops_run": jnp.ones(len(inputs))}
    seen = linear.prediction_and_confidence(logits)
    records = {name: seen[name][None] for name in trace}
    return Output(logits, {}, stats, {}, records)


def init_carried(config, spec, batch_size):
  answers = jnp.ones((batch_size, spec.sequence_length, spec.vocab_size))
  return Carried(
    by_example={
      "answer": answers / spec.vocab_size,
      "age": jnp.arange(batch_size),
    }
  )


def check_teacher(config, teacher):
  if teacher is None:
    raise UserError("model.name='pupil' learns from a teacher: set run.teacher")
  if isinstance(teacher.model, Config):
    raise UserError("a pupil teaches nobody")


def loss(model, batch, key, step, teacher):
  carried = batch["carried"]
  old = carried.by_example["answer"]
  logits = model(batch["inputs"]).logits
  taught = teacher(batch["inputs"]).logits
  chances, own = jax.nn.softmax(taught), jax.nn.softmax(logits)
  distance = -jnp.sum((chances + old) * jax.nn.log_softmax(logits), axis=-1)
  total = token_losses.weighted_mean(
    distance, batch["weights"], batch["mean_weight"]
  )
  teacher_loss = token_losses.weighted_mean(
    token_losses.token_cross_entropy(taught, batch["targets"]),
    batch["weights"],
    batch["mean_weight"],
  )
  after = Carried(
    by_example={
      "answer": (old + own) / 2,
      "age": carried.by_example["age"] + 1,
    }
  )
  return total, {"teacher_loss": teacher_loss, "carried": after}


def costs(config, spec, num_loops):
  flops = 2 * spec.sequence_length * config.width * spec.vocab_size
  return {"flops_per_example": [flops] * num_loops}


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=("prediction", "confidence"),
  check_teacher=check_teacher,
  init_carried=init_carried,
)
