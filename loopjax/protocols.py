"""The interfaces of model families and tasks: what others use of a module.

Families and tasks are modules, held by name in `loopjax.models.MODELS` and
`loopjax.data.TASKS`, where the type checker compares each module with its
protocol. A parameter that takes the module's own `Config` or `Model` has the
type Any here. A feature that only some families have is a protocol of its own,
such as `LearnsFromTeacher`: a family implements it by defining the function.
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


class Dataclass(Protocol):
  """A dataclass; the sections of a config are dataclasses."""

  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class ModelConfig(Dataclass, Protocol):
  """What shared code may read from any family's model config."""

  @property
  def width(self) -> int:
    """Width of the hidden state."""

  @property
  def num_loops(self) -> int:
    """Number of loops in training."""


@runtime_checkable
class Halting(Protocol):
  """A model config with a halting rule."""

  @property
  def halting(self) -> str:
    """The halting rule; "fixed" never stops, "ponder" is an expectation."""


@runtime_checkable
class MemoryTokens(Protocol):
  """A model config with memory tokens, which precede the sequence."""

  @property
  def num_memory_tokens(self) -> int:
    """M, number of memory tokens; may be 0."""


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
    """Predicts tokens.

    Args:
      inputs: token ids [B, T].
      num_loops: number of loops; that of training if None.
      kind: how the loop is executed, see `loopjax.loop.driver`; as in the
        model's options if None.
      trace: what to record in every loop, names from the family's TRACES.
    """
    ...


# The teacher that a loss receives; None if there is no teacher.
AnyTeacher = Model | None


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
    """The model config: a frozen dataclass with the paper's defaults."""

  @property
  def Model(self) -> MakeModel:
    """The model's class."""

  @property
  def TRACES(self) -> tuple[str, ...]:
    """Names of the quantities that a model can record in every loop."""

  @property
  def HEADLINE(self) -> tuple[str, ...]:
    """The family's own metrics to show at the terminal, if any."""

  def loss(
    self, model: Any, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
  ) -> tuple[Array, Metrics]:
    """The training objective.

    Args:
      model: the model to train.
      batch: the task's arrays, and "mean_weight", f32 scalar, the mean token
        weight of the whole batch (`batch` may be a part of it). For a family
        that carries state also "carried", the state after the previous step.
      key: random key of this step; see `keys.by_example`.
      step: number of optimizer steps taken, i32 scalar.
      teacher: the teacher, which is never updated; None without one.

    Returns:
      (loss, f32 scalar; metrics: scalars and per-loop vectors by name,
      including "loss"). The metrics of a family that carries state include
      "carried", the state for the next step.
    """
    ...

  def costs(
    self, config: Any, spec: TaskSpec, num_loops: int
  ) -> dict[str, Any]:
    """FLOPs of the model, counted analytically; a multiply-add counts as two.

    Returns:
      "flops_per_example": for each k = 1 .. num_loops, FLOPs of a forward pass
      with k loops; "training_flops_per_example", if they are not those of three
      forward passes.

    Raises:
      UserError: the model cannot run this many loops.
    """
    ...


class CausalFamily(Family, Protocol):
  """A family that predicts next tokens and can read them incrementally.

  Reading tokens in any number of parts gives the same logits as reading them at
  once, whatever the kind of cache. The exception are caches whose keys and
  values are shared by all loops: there, logits also depend on which tokens are
  read together. The rows of a cache are independent sequences of different
  lengths.
  """

  @property
  def CACHES(self) -> tuple[str, ...]:
    """Kinds of caches; the first is the default."""

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
    """A cache without tokens.

    Args:
      model: the model that will read.
      batch: B, number of rows.
      max_tokens: M, maximum number of tokens of a row. Tokens beyond it are
        lost, except in families whose cache does not grow with the tokens.
      num_loops: number of loops to read with; that of training if None.
      kind: one of CACHES; the first if None.
      prompt_tokens: if not 0, the number of the M places that are reserved for
        tokens read several at a time (prompts). These have separate keys and
        values for every loop, although other tokens share theirs.

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
    """Reads tokens that follow those in a cache.

    Args:
      model: the model that the cache was made for.
      tokens: token ids [B, S]; S = 1 decodes, S > 1 prefills.
      cache: from `empty_cache`, or returned when earlier tokens were read.
      num_loops: the number of loops that the cache was made for.
      valid: bool [B, S], False for padding, which may be anywhere and is
        skipped. No padding if None.

    Returns:
      (output, the cache after these tokens). The output has logits [B, S, V];
      they are arbitrary at padding.
    """
    ...


@runtime_checkable
class ExitsEarly(Protocol):
  """A causal family whose `read` takes `exit_policy`: `ExitPolicy | None`."""

  def exit_rule(self, config: Any) -> str:
    """The exit rule of models with this config, unless another is chosen."""

  def check_exits(self, config: Any, rule: str, kept: str, kind: str) -> None:
    """Raises UserError for early exits that this model cannot make.

    Args:
      config: the model config.
      rule, kept: as in `loopjax.loop.exits.ExitPolicy`.
      kind: the kind of cache.
    """


@runtime_checkable
class LeavesUntrained(Protocol):
  """A family whose loss may leave out parameters, which are then frozen."""

  def untrained(self, config: Any) -> str:
    """A regular expression like `optim.frozen`; "" if all are trained."""


@runtime_checkable
class HaltsByMass(Protocol):
  """A family whose layers stop iterating on a token that has halted.

  Its model's `__call__` also takes `exit_threshold`, f32 scalar in (0, 1]: a
  token halts when the sum of its halting probabilities reaches it.
  """

  @property
  def HALTING_TRACE(self) -> str:
    """Name in TRACES of the halting probabilities, f32 [K, B, T, L]."""


@runtime_checkable
class HasSpan(Protocol):
  """A cache of keys and values, of which attention may read a prefix only."""

  def within(self, span: int | None) -> Any:
    """The same cache; attention reads only the first `span` places of a row.

    These must include all tokens of the rows, also the new ones. None for all.
    """


@runtime_checkable
class StacksLayers(Protocol):
  """A causal family with stacked layer parameters, which can be unstacked."""

  def unstacked(self, model: Any) -> Any:
    """The model with a separate array for each layer's parameters.

    To be called under jit, outside the loop over tokens; on CPUs decoding is
    faster, see `nn.stack.unstacked`.
    """


class Teacher(Protocol):
  """The settings of the teacher's run that a family may read."""

  @property
  def family(self) -> Family:
    """The teacher's family."""

  @property
  def model(self) -> ModelConfig:
    """The teacher's model config."""

  @property
  def spec(self) -> TaskSpec:
    """The spec of the teacher's task; `vocab_size` is that of the student."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
  """A family whose loss uses the teacher."""

  def check_teacher(
    self, config: Any, spec: TaskSpec, teacher: Teacher | None
  ) -> None:
    """Raises UserError if the teacher is unsuitable, or missing but needed."""


@runtime_checkable
class CarriesState(Protocol):
  """A family that carries state, other than parameters, between steps."""

  def init_carried(
    self, config: Any, spec: TaskSpec, batch_size: int
  ) -> Carried:
    """The state before the first step; `loss` reads and replaces it."""
    ...


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
    """What a model needs to know about the task; loads no data."""
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
      batch_size: number of rows of a batch over all processes.
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
