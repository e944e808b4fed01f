"""Optional features of families and model configs.

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
  """A model config whose texts are processed in whole chunks, except the last.

  Tokens of a chunk see less of each other than of earlier tokens, so the result
  depends on where chunks end.
  """

  def read_chunk(self, spec: TaskSpec) -> int:
    """Tokens of a chunk."""


@runtime_checkable
class ExitsEarly(Protocol):
  """A causal family whose `read` takes `exit_policy`: `ExitPolicy | None`."""

  def exit_rule(self, config: Any) -> str:
    """The exit rule of models with this config, unless another is chosen."""

  def check_exits(self, config: Any, rule: str, kept: str, kind: str) -> None:
    """Raises UserError for early exits that this model does not support.

    Args:
      config: the model config.
      rule, kept: as in `loopjax.loop.exits.ExitPolicy`.
      kind: the kind of cache.
    """


@runtime_checkable
class Resumes(Protocol):
  """A causal family whose `read` can stop after some loops and resume later.

  `read` also takes `resumed`: `exits.Resumed | None`, together with an exit
  policy, and its output's trace has "state", [B, S, D], to resume from. Both
  calls together fill the cache like one call with all loops.
  """

  def check_resumes(self, config: Any, kind: str) -> None:
    """Raises UserError for a kind of cache that does not support this."""


@runtime_checkable
class AdvancesRows(Protocol):
  """A causal family with early exits whose rows may be in different loops."""

  def between_tokens(self, model: Any, batch: int, rule: str) -> Any:
    """The progress of B rows between two tokens: zeros [B, ...].

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
    """Runs one loop of each row's next token, until the row exits.

    The result for a token that exited equals `read` with the same policy, whose
    `kept` must not be "computed".

    Args:
      model: the model.
      tokens: token ids [B, 1], the same in each loop of a token.
      cache: cache of the tokens before them.
      progress: from `between_tokens`, or of the loops before.
      num_loops: the number of loops that the cache was made for.
      valid: bool [B, 1]; cache and progress of other rows do not change.
      exit_policy: an `ExitPolicy`.

    Returns:
      (output, cache, progress). The output's "loops_run" is the number of loops
      of a row that exited, and 0 for other rows.
    """
    ...


@runtime_checkable
class LeavesUntrained(Protocol):
  """A family whose loss may not use some parameters, which are then frozen."""

  def untrained(self, config: Any) -> str:
    """A regular expression like `optim.frozen`; "" if all are trained."""


@runtime_checkable
class HasGateRate(Protocol):
  """A family some of whose parameters have `optim.gate_rate`."""

  def has_gate_rate(self, config: Any) -> bool:
    """Whether a model with this config has such parameters."""
    ...


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
  """A causal family that can compute logits after every loop of one pass.

  Its model's `__call__` also takes `targets`, int [B, T]: the trace then has
  the records of `models.every_loop.measured` after each loop.
  """

  def reads_out_every_loop(self, config: Any) -> bool:
    """Whether the logits after loop k are those of a model with k loops."""


@runtime_checkable
class Measured(Protocol):
  """A model with numbers that follow from its parameters alone."""

  def measures(self) -> dict[str, Array]:
    """Scalars, f32, by name."""


@runtime_checkable
class HasSpan(Protocol):
  """A cache of keys and values of which attention may read only a prefix."""

  def within(self, span: int | None) -> Any:
    """The same cache; attention reads only the first `span` positions of a row.

    These must include all tokens of the rows, also the new ones. None for all.
    """


@runtime_checkable
class HasPlaces(Protocol):
  """A cache with one position per token, whose rows can be truncated.

  If every loop has separate entries, a position depends only on the tokens up
  to it, not on which tokens were processed together.
  """

  def cut(self, length: Array, rows: Array) -> Any:
    """The same cache; `rows`, bool [B], keep only `length` tokens, i32 [B]."""

  def of_rows(self, rows: Array, span: int | None, *, apart: bool) -> Any:
    """The first positions of some rows, see `attention.cache.Cache`."""

  def with_rows(self, part: Any, rows: Array, num_tokens: int) -> Any:
    """This cache, updated with the new entries of such a part."""


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
    """The spec of the teacher's task, with the student's `vocab_size`."""


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
