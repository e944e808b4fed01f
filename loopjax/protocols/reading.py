"""Prefill and decode, of families that predict next tokens (ADR 7)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from loopjax.types import Array, Output, TaskSpec


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
    prompt_tokens: int = 0,
  ) -> Any:
    """Makes a cache.

    Args:
      model: the model that will use the cache.
      batch: B, number of rows.
      max_tokens: M, maximum number of tokens of a row. Tokens beyond it are
        lost, except in families whose cache does not grow with the tokens.
      num_loops: number of loops; as in training if None.
      kind: one of `Reading.caches`; the first if None.
      prompt_tokens: if not 0, the number of the M positions reserved for
        prompts. These have separate keys and values for every loop, although
        loops of other tokens share theirs.

    Returns:
      A pytree of arrays of fixed shapes.
    """
    ...


class Read(Protocol):
  """A function that processes tokens: prefill or decode.

  Of a family with `Exits` it also takes `exit_policy`: `ExitPolicy | None`, and
  if these have `check_resumes` also `resumed`: `exits.Resumed | None`.
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


class Advance(Protocol):
  """A function that runs one loop of each row's next token."""

  def __call__(
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
    """Runs it, until the row exits.

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


@dataclasses.dataclass(frozen=True)
class ByDepth:
  """Decoding of rows that may be in different loops.

  Attributes:
    between_tokens: (model, B, exit rule) -> the progress of B rows between two
      tokens: zeros [B, ...].
    advance: one loop of each row.
  """

  between_tokens: Callable[[Any, int, str], Any]
  advance: Advance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exits:
  """Early exits: `read` takes `exit_policy`.

  Attributes:
    rule: config -> the exit rule of models with this config, unless another is
      chosen.
    check: raises UserError for exits that a model does not support.
    check_resumes: of a family whose `read` can stop after some loops and resume
      later, (config, kind of cache); raises UserError for a kind that does not
      support this. `read` then takes `resumed` together with an exit policy,
      and its output's trace has "state", [B, S, D], to resume from. Both calls
      together fill the cache like one call with all loops.
    by_depth: decoding of rows in different loops.
  """

  rule: Callable[[Any], str]
  check: CheckExits
  check_resumes: Callable[[Any, str], None] | None = None
  by_depth: ByDepth | None = None


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
    has_places: whether caches are `HasPlaces`, except those with places
      reserved for prompts.
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

  def of_rows(self, rows: Array, span: int | None, *, apart: bool) -> Any:
    """The first positions of some rows, see `attention.cache.Cache`."""

  def with_rows(self, part: Any, rows: Array, num_tokens: int) -> Any:
    """This cache, updated with the new entries of such a part."""
