"""The requests that an engine supports."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from loopjax.errors import UserError
from loopjax.generate.programs import sizes, slots
from loopjax.generate.programs.cached_model import CachedModel
from loopjax.generate.requests import GenerationRequest


class Limits(NamedTuple):
  """The limits of an engine.

  Attributes:
    num_tokens: number of the model's tokens, padding ids excluded.
    max_tokens: maximum length of a sequence, including the prompt; None for
      any.
    min_loops, num_loops: minimum and maximum number of loops per token.
    exit_rule: the rule of early exits.
    rows_at_once: sequences decoded in one call; None for all slots, also empty
      ones.
    unrolls: whether each loop of a token can be compiled separately.
    check_prefill: raises UserError if fewer loops cannot prefill prompts.
  """

  num_tokens: int
  max_tokens: int | None
  min_loops: int
  num_loops: int
  exit_rule: str
  rows_at_once: int | None
  unrolls: bool
  check_prefill: Callable[[], None]

  @property
  def num_top(self) -> int:
    """Maximum number of most likely tokens to report; small models have few."""
    return min(slots.MAX_TOP, self.num_tokens)

  @property
  def has_exits(self) -> bool:
    """Whether tokens may exit early."""
    return self.exit_rule != "fixed"

  @property
  def has_prefill(self) -> bool:
    """Whether fewer loops can prefill prompts."""
    if self.num_loops == self.min_loops:
      return False
    try:
      self.check_prefill()
    except UserError:
      return False
    return True

  def row_sizes(self, num_slots: int) -> list[int]:
    """The compiled numbers of sequences decoded together."""
    if self.rows_at_once is None:
      return [num_slots]
    return sizes.powers(1, min(num_slots, self.rows_at_once))

  @property
  def spans(self) -> list[int | None]:
    """All values that `span` returns."""
    max_tokens, spans = self.max_tokens, [0]
    if max_tokens is None:
      return [None]
    while spans[-1] < max_tokens:
      spans.append(sizes.span(spans[-1] + 1, max_tokens))
    return [*spans[1:]]

  def depth(self, num_rows: int) -> str:
    """One of `slots.DEPTHS`, for sequences that all run all loops."""
    # Writes to a single row's slots would copy them if they are unstacked.
    unrolls = self.unrolls and num_rows > 1
    return slots.UNROLLED if unrolls else slots.LOOPS

  def room(self, num_prompt: int) -> int | None:
    """Maximum number of tokens after a prompt; None for any number."""
    if self.max_tokens is None:
      return None
    return self.max_tokens - num_prompt + 1  # The last token is never read.

  def check_room(self, label: str, num_tokens: int, num_prompt: int) -> None:
    """Raises UserError if the requested number of new tokens does not fit.

    A prompt that leaves no room is an error of its own, see `check`.

    Args:
      label: the setting's name in the message.
      num_tokens: number of tokens after the prompt.
      num_prompt: number of tokens of the prompt.
    """
    room = self.room(num_prompt)
    if room is not None and 0 < room < num_tokens:
      raise UserError(
        f"{label}={num_tokens} is more than the {room} tokens that fit after a"
        f" prompt of {num_prompt} token(s):"
        f" {label.replace('new_', '')}={self.max_tokens}"
      )

  def span(self, num_tokens: int) -> int | None:
    """Number of cache entries to read for this many tokens; None for all."""
    max_tokens = self.max_tokens
    return None if max_tokens is None else sizes.span(num_tokens, max_tokens)

  def check(self, request: GenerationRequest) -> None:
    """Raises UserError for an unsupported request."""
    unknown = [x for x in request.prompt if not 0 <= x < self.num_tokens]
    if unknown:
      raise UserError(
        f"the prompt has token id {unknown[0]}, expected less than"
        f" {self.num_tokens}"
      )
    capacity = self.max_tokens
    if capacity and len(request.prompt) > capacity:
      raise UserError(
        f"the prompt has {len(request.prompt)} tokens; the cache has room for"
        f" {capacity}: see --max_tokens"
      )
    loops, low, high = request.num_loops, self.min_loops, self.num_loops
    if loops and not low <= loops <= high:
      raise UserError(f"num_loops={loops} is not in [{low}, {high}]")
    if request.exit_threshold < 1 and not self.has_exits:
      raise UserError(
        f"exit_threshold={request.exit_threshold} has no effect with a fixed"
        " number of loops"
      )
    if request.prefill_loops:
      self.check_prefill()
      max_loops = loops or high
      if not low <= request.prefill_loops <= max_loops:
        raise UserError(
          f"prefill_loops={request.prefill_loops} is not in [{low},"
          f" {max_loops}]"
        )

  def fitted(self, request: GenerationRequest) -> GenerationRequest:
    """The request without settings that would have no effect."""
    max_new_tokens, room = (
      request.max_new_tokens,
      self.room(len(request.prompt)),
    )
    prefill_loops, loops = (
      request.prefill_loops,
      request.num_loops or self.num_loops,
    )
    return dataclasses.replace(
      request,
      max_new_tokens=max_new_tokens
      if room is None
      else min(max_new_tokens, room),
      prefill_loops=prefill_loops if prefill_loops < loops else 0,
    )


def of_model(cached: CachedModel, model: Any, params: Any) -> Limits:
  """The limits of an engine that runs a model.

  Args:
    cached: the model without its parameters.
    model: the model.
    params: its parameters.
  """
  num_loops, spec = cached.num_loops, model.spec
  takes_rows = cached.takes_rows
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
  return Limits(
    num_tokens=spec.num_tokens,
    max_tokens=cached.max_tokens if cached.is_bounded(params) else None,
    min_loops=1 if cached.reading.exits else num_loops,
    num_loops=num_loops,
    exit_rule=cached.exit_rule,
    rows_at_once=sizes.rows_at_once(num_bytes) if takes_rows else None,
    unrolls=takes_rows and cached.unrolls(model.config),
    check_prefill=functools.partial(cached.check_prefill, model.config),
  )
