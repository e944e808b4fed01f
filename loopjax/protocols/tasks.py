"""What every task defines."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from loopjax.protocols.families import Dataclass
from loopjax.types import (
  Batch,
  Dataset,
  Output,
  TaskSpec,
)


class Task(Protocol):
  """A module of `loopjax.data`."""

  @property
  def Config(self) -> Callable[..., Dataclass]:
    """The task config: a frozen dataclass."""

  @property
  def TRACES(self) -> tuple[str, ...]:
    """Traces that `score` uses if the family can record them."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """Scores to show at the terminal, the most informative first."""

  def spec(self, config: Any) -> TaskSpec:
    """The task's properties that a model depends on; loads no data."""
    ...

  def make_dataset(
    self,
    config: Any,
    split: str,
    *,
    batch_size: int,
    seed: int,
    rows: np.ndarray | None = None,
  ) -> Dataset:
    """Batches of a split.

    Args:
      config: the task config.
      split: "train"; "validation", used for model selection; or "test".
      batch_size: number of rows per batch over all processes.
      seed: seed of the order of training examples.
      rows: the rows of every global batch that this process reads; all if None.

    Raises:
      UserError: a file is missing or malformed.
    """
    ...

  def abstract_batch(
    self, config: Any, batch_size: int
  ) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a training batch, without making the data."""
    ...

  def score(self, output: Output, batch: Batch) -> dict[str, Any]:
    """Scores of every example, by name.

    Predictions are obtained from `losses.tokens.scores`, because evaluations of
    causal models do not compute all logits.

    Returns:
      For each score f32 [B], or (values f32 [B], weights f32 [B]) if the mean
      over a split is weighted, for example by the bytes of each row.
    """
    ...
