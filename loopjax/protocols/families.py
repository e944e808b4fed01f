"""What a family of models is: one record, and the parts that it may have."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from flax import nnx

from loopjax.protocols.reading import Reading
from loopjax.types import (
  Array,
  Batch,
  Carried,
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
      trace: what to record in every loop, names from the family's `traces`.
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


class Loss(Protocol):
  """A training objective."""

  def __call__(
    self, model: Any, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
  ) -> tuple[Array, Metrics]:
    """Computes the loss of a batch.

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


class Costs(Protocol):
  """FLOPs of a model, counted analytically; a multiply-add counts as two."""

  def __call__(
    self, config: Any, spec: TaskSpec, num_loops: int
  ) -> dict[str, Any]:
    """Counts them.

    Returns:
      "flops_per_example": for each k = 1 .. num_loops, FLOPs of a forward pass
      with k loops; "training_flops_per_example", if a training step differs
      from three forward passes.

    Raises:
      UserError: the model cannot run this many loops.
    """
    ...


class Teacher(Protocol):
  """The settings of the teacher's run that a family may read."""

  @property
  def family(self) -> "Family":
    """The teacher's family."""

  @property
  def model(self) -> ModelConfig:
    """The teacher's model config."""

  @property
  def spec(self) -> TaskSpec:
    """The spec of the teacher's task, with the student's `vocab_size`."""


class CheckTeacher(Protocol):
  """Checks the teacher of a run."""

  def __call__(
    self, config: Any, spec: TaskSpec, teacher: Teacher | None
  ) -> None:
    """Raises UserError if the teacher is unsuitable, or missing but needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family of models; its module ends with `FAMILY = Family(...)`.

  A part that is None is what the family cannot do. `config` is a record of
  `Config`, `model` a value of `Model`.

  Attributes:
    Config: the model config: a frozen dataclass with the paper's defaults.
    Model: the model's class.
    loss: the training objective.
    costs: FLOPs.
    traces: names of the quantities that a model can record in every loop.
    groups: names of the settings of `Config` that belong to one mechanism, by
      its name; the other settings are shown first.
    headline: the family's own metrics to show at the terminal.
    reading: prefill and decode, of a family that predicts next tokens.
    check_schedule: (config, number of steps of the run); raises UserError if
      the loss's changes over the steps of a run take more steps than it has.
    check_teacher: of a family whose loss uses the teacher.
    init_carried: (config, spec, batch size) -> the state, other than
      parameters, before the first step; `loss` reads and replaces it.
    untrained: config -> a regular expression like `optim.frozen` of parameters
      that the loss does not use and that are then frozen; "" for none.
    reads_out_every_loop: config -> whether the logits after loop k are the same
      as of a model with k loops, of a causal family whose `Model.__call__` also
      takes `targets`, int [B, T]: the trace then has the records of
      `models.every_loop.measured` after each loop.
    measures: model -> scalars, f32, by name, that follow from its parameters
      alone.
    halting_rule: config -> its rule; "fixed" never stops, "ponder" is an
      expectation.
    halting_trace: of a family whose layers stop iterating on a token that has
      halted, the name in `traces` of the halting probabilities, f32
      [K, B, T, L]. Its `Model.__call__` also takes `exit_threshold`, f32 scalar
      in (0, 1]: a token halts when the sum of its probabilities reaches it.
    num_memory_tokens: config -> number of memory tokens, which precede the
      sequence; may be 0.
  """

  Config: Callable[..., ModelConfig]
  Model: MakeModel
  loss: Loss
  costs: Costs
  traces: tuple[str, ...]
  groups: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict, hash=False
  )
  headline: tuple[str, ...] = ()
  reading: Reading | None = None
  check_schedule: Callable[[Any, int], None] | None = None
  check_teacher: CheckTeacher | None = None
  init_carried: Callable[[Any, TaskSpec, int], Carried] | None = None
  untrained: Callable[[Any], str] | None = None
  reads_out_every_loop: Callable[[Any], bool] | None = None
  measures: Callable[[Any], Mapping[str, Array]] | None = None
  halting_rule: Callable[[Any], str] | None = None
  halting_trace: str | None = None
  num_memory_tokens: Callable[[Any], int] | None = None
