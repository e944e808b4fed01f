"""What only some families and model configs have.

A family has a feature if it defines the names of its protocol.
"""

from typing import Any, Protocol, runtime_checkable

from loopjax.protocols.families import Family, ModelConfig
from loopjax.types import (
  Array,
  Carried,
  Output,
  TaskSpec,
)


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
class Resumes(Protocol):
  """A causal family whose `read` stops after some loops, and goes on later.

  `read` also takes `resumed`: `exits.Resumed | None`, together with an exit
  policy, and its output's trace has "state", [B, S, D], to go on from. Both
  readings together fill the cache as one of all loops does.
  """

  def check_resumes(self, config: Any, kind: str) -> None:
    """Raises UserError for a kind of cache of which this does not hold."""


@runtime_checkable
class AdvancesRows(Protocol):
  """A causal family with early exits whose rows may be in different loops."""

  def between_tokens(self, model: Any, batch: int, rule: str) -> Any:
    """The progress of B rows that have begun no token: zeros [B, ...].

    Args:
      model: the model.
      batch: B.
      rule: the exit rule that will be applied.
    """

  def advance(
    self,
    model: Any,
    tokens: Array,
    cache: Any,
    progress: Any,
    *,
    num_loops: int,
    valid: Array,
    exit_policy: Any,
  ) -> tuple[Output, Any, Any]:
    """Runs one loop of each row's next token; a row that leaves has read it.

    A token that has left is read as by `read` with the same policy, which must
    not keep what is "computed".

    Args:
      model: the model.
      tokens: token ids [B, 1], the same in each loop of a token.
      cache: cache of the tokens before them.
      progress: from `between_tokens`, or of the loops before.
      num_loops: the number of loops that the cache was made for.
      valid: bool [B, 1]; of other rows neither cache nor progress changes.
      exit_policy: an `ExitPolicy`.

    Returns:
      (output, cache, progress). The output's "loops_run" is the number of loops
      of a row that has left, and 0 for a row with loops to come.
    """
    ...


@runtime_checkable
class LeavesUntrained(Protocol):
  """A family whose loss may leave out parameters, which are then frozen."""

  def untrained(self, config: Any) -> str:
    """A regular expression like `optim.frozen`; "" if all are trained."""


@runtime_checkable
class HasSchedule(Protocol):
  """A family whose loss changes over the steps of a run."""

  def check_schedule(self, config: Any, num_steps: int) -> None:
    """Raises UserError if the changes take more steps than the run has."""


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
class ReadsOutEveryLoop(Protocol):
  """A causal family that can read out after every loop of one pass.

  Its model's `__call__` also takes `targets`, int [B, T]: the trace then has
  what `models.every_loop.measured` records after each loop.
  """

  def reads_out_every_loop(self, config: Any) -> bool:
    """Whether that is, after k loops of more, the read-out of k loops."""


@runtime_checkable
class Measured(Protocol):
  """A model with numbers that follow from its parameters alone."""

  def measures(self) -> dict[str, Array]:
    """Scalars, f32, by name."""


@runtime_checkable
class HasSpan(Protocol):
  """A cache of keys and values, of which attention may read a prefix only."""

  def within(self, span: int | None) -> Any:
    """The same cache; attention reads only the first `span` places of a row.

    These must include all tokens of the rows, also the new ones. None for all.
    """


@runtime_checkable
class HasPlaces(Protocol):
  """A cache with a place for each token, whose rows can be cut.

  What a place holds depends on the tokens up to it, not on what was read
  together, if every loop has its own.
  """

  def cut(self, length: Array, rows: Array) -> Any:
    """The same cache; of `rows`, bool [B], only `length` tokens, i32 [B]."""

  def of_rows(self, rows: Array, span: int | None, *, apart: bool) -> Any:
    """A cache of the first places of some rows, see `attention.cache.Cache`."""

  def with_rows(self, part: Any, rows: Array, num_tokens: int) -> Any:
    """This cache, with what was added to such a part of it."""


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
