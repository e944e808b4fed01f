"""What a model family and a task are: every name of theirs that others use.

Both are modules. `loopjax.models.MODELS` and `loopjax.data.TASKS` hold them by
name, and there the type checker compares each module with its protocol. Where
a function takes its module's own `Config` or `Model` the protocol says Any:
what goes in is what the same module made. What only some families need is a
protocol of its own, `LearnsFromTeacher` and `CarriesState`: a family has it by
having the function.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from loopjax.types import (
  Array,
  Batch,
  Carried,
  Dataset,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)


class Record(Protocol):
  """A dataclass, as every section of a config is."""

  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class ModelConfig(Record, Protocol):
  """What shared code knows of any section model."""

  @property
  def width(self) -> int:
    """Of the hidden state."""

  @property
  def num_loops(self) -> int:
    """Loops trained with."""


@runtime_checkable
class Halting(Protocol):
  """A section model whose tokens may stop by themselves."""

  @property
  def halting(self) -> str:
    """The rule: "fixed", "act" or "ponder"."""


@runtime_checkable
class MemoryTokens(Protocol):
  """A section model that puts tokens of its own in front of the sequence."""

  @property
  def num_memory_tokens(self) -> int:
    """M; 0 for none."""


class Model(Protocol):
  """A model with its parameters."""

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Predicts from token ids [B, T].

    Args:
      inputs: token ids.
      num_loops: as trained if None.
      kind: how the loop runs, see `loopjax.loop.driver`; as built if None.
      trace: what to show of every loop, names out of the family's TRACES.
    """
    ...


# What a loss gets of a teacher: its model, or None without one.
Frozen = Model | None


class MakeModel(Protocol):
  """A model's constructor."""

  def __call__(
    self,
    config: Any,
    spec: TaskSpec,
    options: LoopOptions = ...,
    *,
    rngs: nnx.Rngs,
  ) -> Model:
    """A model with fresh parameters."""
    ...


class Family(Protocol):
  """A module of `loopjax.models`."""

  @property
  def Config(self) -> Callable[..., ModelConfig]:
    """The section model: a frozen dataclass; its defaults are the paper's."""

  @property
  def Model(self) -> MakeModel:
    """The constructor."""

  @property
  def TRACES(self) -> tuple[str, ...]:
    """What a model can show of every loop."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """Which of its own metrics a person wants to see, if there are any."""

  def loss(
    self, model: Any, batch: Batch, key: Array, step: Array, frozen: Frozen
  ) -> tuple[Array, Metrics]:
    """What training lowers.

    Args:
      model: to be trained.
      batch: the task's entries, and "mean_weight", f32 scalar, of the weights
        of the whole batch of which this may be a part. Of a family that carries
        state also "carried", from the step before.
      key: of this step's random numbers.
      step: optimizer steps taken, i32 scalar.
      frozen: the teacher, which is never updated; None without one.

    Returns:
      (f32 scalar, metrics: scalars and per-loop vectors by name, among them
      "loss"). Of a family that carries state also "carried", for the next step.
    """
    ...

  def costs(
    self, config: Any, spec: TaskSpec, num_loops: int
  ) -> dict[str, Any]:
    """What a run of the model takes, counted by hand.

    Returns:
      "flops_per_example": of the forward pass up to and with each loop, a
      multiply-add is two; "cache_bytes_per_token" of generation;
      "training_flops_per_example" where that is not three forward passes.

    Raises:
      UserError: the model cannot run so many loops.
    """
    ...


class Teacher(Protocol):
  """What a family may ask of the run that it learns from."""

  @property
  def family(self) -> Family:
    """Of its model."""

  @property
  def model(self) -> ModelConfig:
    """Its section model."""

  @property
  def spec(self) -> TaskSpec:
    """Of its task, which has as many token ids."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
  """A family whose loss reads `frozen`."""

  def check_teacher(
    self, config: Any, spec: TaskSpec, teacher: Teacher | None
  ) -> None:
    """Raises UserError if the model cannot learn from it, or without any."""


@runtime_checkable
class CarriesState(Protocol):
  """A family with state from step to step that no gradient makes."""

  def init_carried(
    self, config: Any, spec: TaskSpec, batch_size: int
  ) -> Carried:
    """What the first step gets; `loss` gets it in the batch and returns it."""
    ...


class Task(Protocol):
  """A module of `loopjax.data`."""

  @property
  def Config(self) -> Callable[..., Record]:
    """The section task: a frozen dataclass."""

  @property
  def TRACES(self) -> tuple[str, ...]:
    """Records of every loop that `score` reads, if a model has them."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """Which scores a person wants to see; the first one says it best."""

  def spec(self, config: Any) -> TaskSpec:
    """What a model must know to be built, without any data."""
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
      config: of the task.
      split: "train"; "validation", which choices are made by; or "test".
      batch_size: over all processes.
      seed: of the order of training.
      rows: of every global batch that this process reads; all if None.

    Raises:
      UserError: a missing or malformed file.
    """
    ...

  def abstract_batch(
    self, config: Any, batch_size: int
  ) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a training batch, without making the data."""
    ...

  def score(self, output: Output, batch: Batch) -> dict[str, Any]:
    """Scores of every example, f32 [B] by name.

    Where examples do not count alike, as rows of text that have other numbers
    of bytes, (scores, weights f32 [B]): the mean over a split is weighted.
    """
    ...
