"""Parity: after every bit, whether the number of ones so far is odd."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

TRACES: tuple[str, ...] = ()  # `score` reads no trace.
HEADLINE = ("exact_match", "accuracy")
_ORDER = 7  # Seed of the permutation that divides all rows among the splits.


@dataclasses.dataclass(frozen=True)
class Config:
  """All rows of `length` bits; `num_eval_examples` of them in each test split.

  Raises:
    UserError: a value is invalid.
  """

  length: int = checks.setting(12, least=1)
  num_eval_examples: int = checks.setting(512, least=1)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    if 2 * self.num_eval_examples >= 2**self.length:
      raise UserError(
        f"task.length={self.length} leaves no row to train on after twice"
        f" task.num_eval_examples={self.num_eval_examples}"
      )


def spec(config: Config) -> TaskSpec:
  """Two tokens, 0 and 1, in rows of `length`."""
  return TaskSpec(vocab_size=2, sequence_length=config.length)


def abstract_batch(
  config: Config, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, config.length)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split: all rows, in a fixed order, cut in three."""
  num_rows, num = 2**config.length, config.num_eval_examples
  first = {"validation": 0, "test": num, "train": 2 * num}[split]

  def make(indices: np.ndarray, _: np.ndarray) -> dict[str, np.ndarray]:
    number = pipeline.shuffled(first + indices, num_rows, _ORDER)
    bits = (number[:, None] >> np.arange(config.length)) & 1
    return {
      "inputs": bits.astype(np.int32),
      "targets": (np.cumsum(bits, axis=1) % 2).astype(np.int32),
      "weights": np.ones(bits.shape, np.float32),
    }

  if split == "train":
    batches = pipeline.training_batches(
      make, num_rows - first, batch_size, seed, rows
    )
  else:
    batches = pipeline.evaluation_batches(make, num, batch_size, rows)
  return Dataset(batches)


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Loss in nats, share of right parities, and whether all are right: [B]."""
  losses, predicted = token_losses.scores(output, batch["targets"])
  right = (predicted == batch["targets"]).astype(jnp.float32)
  return {
    "loss": losses.mean(axis=1),
    "accuracy": right.mean(axis=1),
    "exact_match": right.min(axis=1),
  }
