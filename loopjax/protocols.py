"""The interface of a model family and of a task: every name that others use.

Both are modules. `loopjax.models.MODELS` and `loopjax.data.TASKS` hold them by
name, and there the type checker compares each module with its protocol. Where
a function takes its module's own `Config` or `Model` the protocol says Any:
the argument was made by the same module. What only some families need is a
separate protocol, `LearnsFromTeacher` or `CarriesState`: a family implements it
by defining the function.
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
  """What shared code may assume about any section model."""

  @property
  def width(self) -> int:
    """Width of the hidden state."""

  @property
  def num_loops(self) -> int:
    """Number of loops in training."""


@runtime_checkable
class Halting(Protocol):
  """A section model whose tokens may halt early."""

  @property
  def halting(self) -> str:
    """The rule: "fixed", "act" or "ponder"."""


@runtime_checkable
class MemoryTokens(Protocol):
  """A section model that prepends memory tokens to the sequence."""

  @property
  def num_memory_tokens(self) -> int:
    """M; 0 for none."""


@runtime_checkable
class ReadsByChunk(Protocol):
  """A section model whose texts are read in whole chunks, the last one aside.

  Tokens of a chunk see less of each other than of earlier tokens, so that the
  result depends on where chunks end.
  """

  def read_chunk(self, spec: TaskSpec) -> int:
    """Tokens of a chunk."""


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
      num_loops: the trained number if None.
      kind: how the loop runs, see `loopjax.loop.driver`; as built if None.
      trace: what to record in every loop, names from the family's TRACES.
    """
    ...


# The teacher as a loss receives it: its model, or None without one.
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
    """Names of what a model can record in every loop."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """Those of its own metrics to show at the terminal, if any."""

  def loss(
    self, model: Any, batch: Batch, key: Array, step: Array, frozen: Frozen
  ) -> tuple[Array, Metrics]:
    """The training objective.

    Args:
      model: the model to train.
      batch: the task's entries, and "mean_weight", f32 scalar, the mean weight
        of the whole batch, of which this may be a part. In a family that
        carries state also "carried", from the previous step.
      key: random key of this step.
      step: optimizer steps taken, i32 scalar.
      frozen: the teacher, which is never updated; None without one.

    Returns:
      (f32 scalar, metrics: scalars and per-loop vectors by name, including
      "loss"). In a family that carries state also "carried", for the next step.
    """
    ...

  def costs(
    self, config: Any, spec: TaskSpec, num_loops: int
  ) -> dict[str, Any]:
    """FLOPs of the model, counted analytically.

    Returns:
      "flops_per_example": of the forward pass up to and including each loop, a
      multiply-add counts as two; "training_flops_per_example"
      where that is not three forward passes.

    Raises:
      UserError: the model cannot run this many loops.
    """
    ...


class CausalFamily(Family, Protocol):
  """A family that predicts next tokens, and can go on where it stopped.

  Whatever a cache is made of, reading tokens in any number of parts gives the
  logits of reading them at once; only where loops share what is kept of a token
  does it matter which tokens are read together. Every row is a sequence of its
  own, of its own length.
  """

  @property
  def CACHES(self) -> tuple[str, ...]:
    """Kinds of caches; the first is the family's own."""

  def empty_cache(
    self,
    model: Any,
    batch: int,
    max_tokens: int,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    prompt_tokens: int = 0,
  ) -> Any:
    """What is kept of rows of which nothing was read.

    Args:
      model: that will read.
      batch: B, rows.
      max_tokens: M, of a row; what is read past it is lost, unless memory does
        not grow with what is read.
      num_loops: that will be read with; the trained number if None.
      kind: one of CACHES; the first if None.
      prompt_tokens: of M, for tokens that are read several at a time: they keep
        every loop's keys and values where others share them. 0 for none.

    Returns:
      A pytree of arrays of fixed shapes.
    """
    ...

  def read(
    self,
    model: Any,
    tokens: Array,
    cache: Any,
    *,
    num_loops: int | None = None,
    valid: Array | None = None,
  ) -> tuple[Output, Any]:
    """Reads tokens after those in a cache.

    Args:
      model: which the cache was made for.
      tokens: token ids [B, S]; S = 1 decodes, S > 1 prefills.
      cache: from `empty_cache`, or from reading what comes before.
      num_loops: what the cache was made for.
      valid: bool [B, S], the tokens that are there; the others are skipped,
        wherever they stand. All if None.

    Returns:
      The output, logits [B, S, V] included, which are arbitrary where no token
      is there; and the cache after these tokens.
    """
    ...


@runtime_checkable
class ExitsEarly(Protocol):
  """A causal family whose `read` takes `leave`, `loop.exits.Exits`, too."""

  def own_rule(self, config: Any) -> str:
    """The rule of exits that a model was made for."""

  def check_exits(self, config: Any, rule: str, kept: str, kind: str) -> None:
    """Raises UserError for exits that cannot be.

    Args:
      config: of the model.
      rule, kept: of `loop.exits.Exits`.
      kind: of the cache.
    """


@runtime_checkable
class HasSpan(Protocol):
  """A cache that grows with the tokens in it, of which some may be read."""

  def within(self, span: int | None) -> Any:
    """The same, of which attention looks at the first `span` places alone.

    Args:
      span: places that hold all tokens of the rows that are read on, new ones
        included; None for all places.
    """


@runtime_checkable
class StacksLayers(Protocol):
  """A causal family that can set the parameters of its layers apart."""

  def apart(self, model: Any) -> Any:
    """The model as it reads single tokens fastest on a CPU, inside a jit."""


class Teacher(Protocol):
  """What a family may read from the teacher's run."""

  @property
  def family(self) -> Family:
    """Family of its model."""

  @property
  def model(self) -> ModelConfig:
    """Its section model."""

  @property
  def spec(self) -> TaskSpec:
    """Spec of its task, which has the same number of token ids."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
  """A family whose loss reads `frozen`."""

  def check_teacher(
    self, config: Any, spec: TaskSpec, teacher: Teacher | None
  ) -> None:
    """Raises UserError for an unsuitable teacher, or a required one missing."""


@runtime_checkable
class CarriesState(Protocol):
  """A family with state between steps that is not updated by gradients."""

  def init_carried(
    self, config: Any, spec: TaskSpec, batch_size: int
  ) -> Carried:
    """State before the first step; `loss` reads it and returns the next."""
    ...


class Task(Protocol):
  """A module of `loopjax.data`."""

  @property
  def Config(self) -> Callable[..., Record]:
    """The section task: a frozen dataclass."""

  @property
  def TRACES(self) -> tuple[str, ...]:
    """Per-loop traces that `score` reads, if a model has them."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """Scores to show at the terminal, the most informative first."""

  def spec(self, config: Any) -> TaskSpec:
    """What is needed to build a model, without loading data."""
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
      split: "train"; "validation", used for model selection; or "test".
      batch_size: over all processes.
      seed: of the training order.
      rows: the rows of every global batch that this process reads; all if None.

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

    What was predicted is read by `losses.tokens.scores`: in an evaluation of a
    causal model they are computed without logits.

    Where examples do not count alike, as rows of text that have other numbers
    of bytes, (scores, weights f32 [B]): the mean over a split is weighted.
    """
    ...
