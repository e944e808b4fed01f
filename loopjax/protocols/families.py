"""What every family of models defines."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from flax import nnx

from loopjax.types import (
  Array,
  Batch,
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

  @property
  def precision(self) -> str:
    """A key of `types.PRECISIONS`."""


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
      with k loops; "training_flops_per_example", if a training step differs
      from three forward passes.

    Raises:
      UserError: the model cannot run this many loops.
    """
    ...


class CausalFamily(Family, Protocol):
  """A family that predicts next tokens and can read them incrementally.

  Processing tokens in any number of chunks gives the same logits as in one
  call, for every kind of cache except those whose keys and values are shared by
  all loops: there, logits also depend on which tokens are processed together.
  The rows of a cache are independent sequences of different lengths.
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
      model: the model that will use the cache.
      batch: B, number of rows.
      max_tokens: M, maximum number of tokens of a row. Tokens beyond it are
        lost, except in families whose cache does not grow with the tokens.
      num_loops: number of loops; as in training if None.
      kind: one of CACHES; the first if None.
      prompt_tokens: if not 0, the number of the M positions reserved for
        prompts. These have separate keys and values for every loop, although
        loops of other tokens share theirs.

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
    """Processes tokens that follow those in a cache: prefill or decode.

    Args:
      model: the model that the cache was made for.
      tokens: token ids [B, S]; S = 1 decodes, S > 1 prefills.
      cache: from `empty_cache`, or returned by an earlier call.
      num_loops: the number of loops that the cache was made for.
      valid: bool [B, S], False for padding, which may be anywhere and is
        skipped. No padding if None.

    Returns:
      (output, the cache after these tokens). The output has logits [B, S, V];
      they are arbitrary at padding.
    """
    ...
