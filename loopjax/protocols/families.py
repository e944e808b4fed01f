"""What a family of models is: one record, and the parts that it may have.

Families that predict next tokens also prefill and decode (ADR 7).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from flax import nnx

from loopjax.loop.driver import Kind
from loopjax.types import (
  Array,
  Batch,
  Carried,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)


class EmptyCache(Protocol):
  """A function that makes a cache without tokens."""

  def __call__(
    self,
    model: Any,
    batch: int,
    max_tokens: int,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
  ) -> Any:
    """Makes a cache.

    Args:
      model: the model that will use the cache.
      batch: B, number of rows.
      max_tokens: M, maximum number of tokens of a row. Tokens beyond it are
        lost, except in families whose cache does not grow with the tokens.
      num_loops: number of loops; as in training if None.
      kind: one of `Reading.caches`; the first if None.

    Returns:
      A pytree of arrays of fixed shapes.
    """
    ...


class Read(Protocol):
  """A function that processes tokens: prefill or decode.

  Of a family with `Exits` it also takes `exit_policy`: `ExitPolicy | None`.
  """

  def __call__(
    self,
    model: Any,
    tokens: Array,
    cache: Any,
    *,
    num_loops: int | None = None,
    valid: Array | None = None,
  ) -> tuple[Output, Any]:
    """Processes tokens that follow those in a cache.

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


class CheckExits(Protocol):
  """Checks early exits."""

  def __call__(self, config: Any, rule: str, kept: str, kind: str) -> None:
    """Raises UserError for early exits that this model does not support.

    Args:
      config: the model config.
      rule, kept: as in `loopjax.loop.exits.ExitPolicy`.
      kind: the kind of cache.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exits:
  """Early exits: `read` takes `exit_policy`.

  Attributes:
    check: raises UserError for exits that a model does not support.
    rule: config -> the exit rule of models with this config, unless another is
      chosen. By default all loops run.
  """

  check: CheckExits
  rule: Callable[[Any], str] = lambda _: "fixed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """How a family that predicts next tokens reads them incrementally.

  Processing tokens in any number of chunks gives the same logits as in one
  call, for every kind of cache except those whose keys and values are shared by
  all loops: there, logits also depend on which tokens are processed together.
  The rows of a cache are independent sequences of different lengths.

  Attributes:
    caches: kinds of caches; the first is the default.
    empty_cache: makes a cache.
    read: processes tokens.
    has_span: whether caches are `HasSpan`.
    has_places: whether caches are `HasPlaces`.
    exits: early exits.
    unstacked: model -> the model with a separate array for each layer's
      parameters. On CPUs decoding is faster, see `nn.stack.unstacked`.
    chunk: (config, spec) -> tokens of a chunk, of models that process texts in
      whole chunks, except the last: tokens of a chunk see less of each other
      than of earlier tokens, and the result depends on where chunks end.
  """

  caches: tuple[str, ...]
  empty_cache: EmptyCache
  read: Read
  has_span: bool = False
  has_places: bool = False
  exits: Exits | None = None
  unstacked: Callable[[Any], Any] | None = None
  chunk: Callable[[Any, TaskSpec], int] | None = None


class HasSpan(Protocol):
  """A cache of keys and values of which attention may read only a prefix."""

  def within(self, span: int | None) -> Any:
    """The same cache; attention reads only the first `span` positions of a row.

    These must include all tokens of the rows, also the new ones. None for all.
    """


class HasPlaces(Protocol):
  """A cache with one position per token, whose rows can be truncated.

  If every loop has separate entries, a position depends only on the tokens up
  to it, not on which tokens were processed together.
  """

  def cut(self, length: Array, rows: Array) -> Any:
    """The same cache; `rows`, bool [B], keep only `length` tokens, i32 [B]."""

  def of_rows(self, rows: Array, span: int | None, *, unstack: bool) -> Any:
    """The first positions of some rows, see `attention.cache.Cache`."""

  def with_rows(self, part: Any, rows: Array, num_tokens: int) -> Any:
    """This cache, updated with the new entries of such a part."""


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
    kind: Kind | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Predicts tokens.

    Args:
      inputs: token ids [B, T].
      num_loops: number of loops; that of training if None.
      kind: how the loop is executed, see `loopjax.loop.driver`, which also
        watches and edits its state; as in the model's options if None.
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
      (loss, f32 scalar; metrics: scalars and per-loop vectors by name, to which
      "loss" is added). The metrics of a family that carries state include
      "carried", the state for the next step.
    """
    ...


class Costs(Protocol):
  """FLOPs of a model, counted analytically; a multiply-add counts as two.

  They count a row's own tokens, masked pairs of attention included, on any
  machine. Point-wise operations do not count, nor tokens that a program adds to
  fill its last chunk.
  """

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


class Start(NamedTuple):
  """How a model begins with the parameters of a trained one.

  Attributes:
    settings: of its config, by name; the others are free.
    fresh: regular expression of the parameters that the trained one lacks.
  """

  settings: Mapping[str, Any]
  fresh: str


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
    check_teacher: of a family whose loss uses the teacher, (config, teacher or
      None); raises UserError if it is unsuitable, or missing but needed.
    made_from: config of a trained model of another family -> how a model of
      this one begins as it; raises UserError if it cannot.
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
    draws_state: config -> whether the state before the first loop is random;
      `Model.__call__` then takes `keys`, [B], a random key for each row, from
      which it is drawn.
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
  check_teacher: Callable[[Any, Teacher | None], None] | None = None
  made_from: Callable[[Any], Start] | None = None
  init_carried: Callable[[Any, TaskSpec, int], Carried] | None = None
  untrained: Callable[[Any], str] | None = None
  reads_out_every_loop: Callable[[Any], bool] | None = None
  measures: Callable[[Any], Mapping[str, Array]] | None = None
  halting_rule: Callable[[Any], str] | None = None
  halting_trace: str | None = None
  draws_state: Callable[[Any], bool] | None = None
  num_memory_tokens: Callable[[Any], int] | None = None
