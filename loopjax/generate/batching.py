"""What an engine accepts, the shapes that it compiles, and a batch's arrays.

The shapes are few, with little padding.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loopjax.errors import UserError
from loopjax.generate import sampling
from loopjax.generate.programs import slots
from loopjax.generate.programs.cached_model import CachedModel
from loopjax.generate.requests import GeneratedToken, GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.scheduler import RunningSequence
from loopjax.protocols import Reading
from loopjax.types import TaskSpec

SMALLEST_SPAN = 64
_SMALLEST_CHUNK = 16
# Weights that stay in a CPU's caches are as fast for eight rows as for more,
# and the places that so few attend to stay there, too:
# benchmarks/results/2026-11-28_cpu_2cores_generation.md.
_SMALL_WEIGHTS, _FEW_ROWS = 16 * 2**20, 8
_FINISH = {slots.STOP: "stop", slots.LENGTH: "length"}


def powers(smallest: int, largest: int, factor: int = 4) -> list[int]:
  """`smallest` times powers of `factor`, below `largest`; then `largest`."""
  sizes = [smallest]
  while sizes[-1] * factor < largest:
    sizes.append(sizes[-1] * factor)
  return [size for size in sizes if size < largest] + [largest]


def fitting(sizes: Sequence[int], num: int) -> int:
  """The first size that is enough for `num`, or the last."""
  return next((size for size in sizes if size >= num), sizes[-1])


def chunk_sizes(
  reading: Reading,
  config: Any,
  spec: TaskSpec,
  prompt_chunk: int,
  max_tokens: int,
) -> list[int]:
  """Sizes of a prompt's chunks; all chunks but its last have the largest.

  Args:
    reading: the family's `Reading`.
    config: the model's config.
    spec: the task's spec.
    prompt_chunk: maximum size, rounded up to whole chunks of a model that reads
      by chunk.
    max_tokens: maximum length of a sequence.
  """
  if reading.chunk:
    prompt_chunk += -prompt_chunk % reading.chunk(config, spec)
  return powers(_SMALLEST_CHUNK, min(prompt_chunk, max_tokens))


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
  def has_exits(self) -> bool:
    """Whether tokens may exit early."""
    return self.exit_rule != "fixed"

  def row_sizes(self, num_slots: int) -> list[int]:
    """The compiled numbers of sequences decoded together."""
    if self.rows_at_once is None:
      return [num_slots]
    return powers(1, min(num_slots, self.rows_at_once))

  def span(self, num_tokens: int) -> int | None:
    """Number of cache entries to read for this many tokens; None for all.

    The least of 64, 96, 128, 192, ... below `max_tokens`.
    """
    size = SMALLEST_SPAN
    while size < num_tokens:
      size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    is_all = self.max_tokens is None or size >= self.max_tokens
    return None if is_all else size

  @property
  def spans(self) -> list[int | None]:
    """All values that `span` returns."""
    found = [self.span(1)]
    while found[-1] is not None:
      found.append(self.span(found[-1] + 1))
    return found

  def depth(self, running: Collection[RunningSequence]) -> str:
    """One of `slots.DEPTHS`, for sequences that decode together."""
    is_full = all(
      sequence.request.exit_threshold == 1
      and sequence.request.num_loops in (0, self.num_loops)
      for sequence in running
    )
    return self.depths(len(running))[0 if is_full else -1]

  def depths(self, num_rows: int) -> list[str]:
    """Values of `depth` for so many sequences: with all loops, and with fewer.

    The program with exits serves any number of loops, and is one fewer.
    """
    # Writes to a single row's slots would copy them if they are unstacked.
    unrolls = self.unrolls and num_rows > 1
    full = slots.UNROLLED if unrolls else slots.LOOPS
    if self.has_exits:
      return [full, slots.EXITS]
    if self.min_loops < self.num_loops:
      return list(dict.fromkeys((full, slots.LOOPS)))
    return [full]

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


def limits_of(cached: CachedModel, model: Any, params: Any) -> Limits:
  """The limits of an engine that runs a model.

  Args:
    cached: the model without its parameters.
    model: the model.
    params: its parameters.
  """
  num_loops, spec = cached.num_loops, model.spec
  takes_rows = cached.takes_rows
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
  rows_at_once = _FEW_ROWS if num_bytes <= _SMALL_WEIGHTS else sys.maxsize
  return Limits(
    num_tokens=spec.num_tokens,
    max_tokens=cached.max_tokens if cached.is_bounded(params) else None,
    min_loops=1 if cached.reading.exits else num_loops,
    num_loops=num_loops,
    exit_rule=cached.exit_rule,
    rows_at_once=rows_at_once if takes_rows else None,
    unrolls=takes_rows and cached.unrolls(model.config),
    check_prefill=functools.partial(cached.check_prefill, model.config),
  )


def prompt_chunks(
  sequences: Mapping[int, RunningSequence],
  num_rows: int,
  length: int,
  *,
  num_slots: int,
  num_loops: int,
) -> slots.PromptChunks:
  """The next tokens of prompts, as arrays on the host.

  Args:
    sequences: P or fewer, by slot.
    num_rows: P.
    length: S, tokens of a chunk.
    num_slots: B, the slot of rows without a prompt.
    num_loops: maximum number of loops per token, unless the request sets it.
  """
  chunks = slots.PromptChunks(
    tokens=np.zeros((num_rows, length), np.int32),
    valid=np.zeros((num_rows, length), bool),
    slot_ids=np.full(num_rows, num_slots, np.int32),
    is_first=np.zeros(num_rows, bool),
    is_last=np.zeros(num_rows, bool),
    slots=slots.Slots(
      token=np.zeros(num_rows, np.int32),
      position=np.zeros(num_rows, np.int32),
      num_left=np.zeros(num_rows, np.int32),
      seen=np.zeros((num_rows, 0), bool),
      stops=np.full((num_rows, slots.MAX_STOPS), -1, np.int32),
      sampling=sampling.to_arrays(
        [
          *(sequence.request.sampling for sequence in sequences.values()),
          *[Sampling()] * (num_rows - len(sequences)),
        ]
      ),
      num_loops=np.full(num_rows, num_loops, np.int32),
      exit_threshold=np.ones(num_rows, np.float32),
    ),
  )
  for row, (slot, sequence) in enumerate(sequences.items()):
    request, start = sequence.request, sequence.num_read
    tokens = request.prompt[start : start + length]
    chunks.tokens[row, : len(tokens)] = tokens
    chunks.valid[row, : len(tokens)] = True
    chunks.slot_ids[row] = slot
    chunks.is_first[row] = start == 0
    chunks.is_last[row] = start + len(tokens) == len(request.prompt)
    after = chunks.slots
    after.position[row] = len(request.prompt)
    if chunks.is_last[row]:  # Nothing is generated before.
      after.num_left[row] = request.max_new_tokens
    after.stops[row, : len(request.stop_tokens)] = request.stop_tokens
    after.num_loops[row] = request.num_loops or num_loops
    after.exit_threshold[row] = request.exit_threshold
  prefill_loops = [
    sequence.request.prefill_loops for sequence in sequences.values()
  ]
  if not any(prefill_loops):
    return chunks
  prefill_loops += [0] * (num_rows - len(prefill_loops))
  return chunks._replace(num_loops=np.array(prefill_loops, np.int32))


def rows(
  slot_ids: Sequence[int], row_sizes: Sequence[int], num_slots: int
) -> np.ndarray:
  """Slots that decode together, in the format of `program.in_rows`: i32 [R].

  Args:
    slot_ids: the slots.
    row_sizes: the compiled numbers R, in order.
    num_slots: B, which stands for no slot.
  """
  size = fitting(row_sizes, len(slot_ids))
  row_slots = np.full(size, num_slots, np.int32)
  places = slot_ids if size == num_slots else range(len(slot_ids))
  row_slots[list(places)] = slot_ids
  return row_slots


def generated_tokens(
  generated: slots.Generated,
  slot_ids: Sequence[int],
  generating: Mapping[int, RunningSequence],
) -> dict[int, GeneratedToken]:
  """The tokens of one step, by slot.

  Args:
    generated: lists of B.
    slot_ids: the rows' slots.
    generating: the sequences, by slot.
  """
  tokens = {}
  for row, slot in enumerate(slot_ids):
    if not generated.valid[row]:
      continue
    sequence = generating[slot]
    num_top = sequence.request.top_log_probabilities
    top = zip(
      generated.top_tokens[row][:num_top],
      generated.top_log_probabilities[row][:num_top],
      strict=True,
    )
    tokens[slot] = GeneratedToken(
      request_id=sequence.request_id,
      token=generated.token[row],
      log_probability=generated.log_probability[row],
      top=tuple(top),
      loops=int(generated.loops[row]),
      finish=_FINISH.get(generated.finish[row]),
      copied=0 if sequence.num_generated else sequence.num_copied,
    )
  return tokens
