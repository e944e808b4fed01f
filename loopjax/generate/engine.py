"""Continuous batching: a batch of slots that sequences use one after another.

A request waits until a slot is free. Its prompt is prefilled in chunks while
the other slots continue decoding; then its tokens are decoded until it ends.
They do not depend on the other requests, except for the rounding of sums.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.generate import batching
from loopjax.generate import prefixes as prefixes_lib
from loopjax.generate.programs import program
from loopjax.generate.programs import slots as slots_lib
from loopjax.generate.programs.cached_model import (
  CachedModel,
  default_exit_rule,
)
from loopjax.generate.requests import GeneratedToken as GeneratedToken
from loopjax.generate.requests import GenerationRequest as GenerationRequest
from loopjax.generate.sampling import Sampling as Sampling
from loopjax.generate.scheduler import BySlot, RunningSequence, Scheduler
from loopjax.protocols import Family, Reading

MAX_PREFILLS = 4  # Prompts per prefill, which copies their rows of the cache.
TOKENS_PER_DISPATCH, PROMPT_CHUNK = 8, 256  # Defaults.


class Engine:
  """Generates continuations of prompts with a causal model.

  Attributes:
    num_slots: maximum number of sequences in the batch.
    limits: the supported requests. A sequence may have any length if the
      family's cache does not grow with it.
    cache_kind: the kind of cache, one of the family's `caches`.
    cache_bytes: size of the cache.
    chunk_sizes, group_sizes, row_sizes: the compiled sizes: tokens per prompt
      chunk, prompts prefilled together, and sequences decoded together; in
      order.
    tokens_per_dispatch: tokens generated per call on the device.
    prefixes: the prefix cache; None without one.
  """

  def __init__(
    self,
    family: Family,
    graphdef: nnx.GraphDef,
    params: Any,
    *,
    num_slots: int,
    max_tokens: int,
    num_loops: int | None = None,
    cache_kind: str | None = None,
    exit_rule: str | None = None,
    exit_kept: str = "copy",
    tokens_per_dispatch: int = TOKENS_PER_DISPATCH,
    prompt_chunk: int = PROMPT_CHUNK,
    prefix_mib: int = 0,
  ):
    """Allocates the cache; programs are compiled when they are first needed.

    Args:
      family: the model's family, a value of `loopjax.models.MODELS`.
      graphdef: the model without its parameters.
      params: the model's parameters.
      num_slots: B, maximum number of sequences in the batch.
      max_tokens: maximum length of a sequence, prompt included.
      num_loops: maximum number of loops of a token; the trained number if None.
      cache_kind: one of the family's `caches`; the first if None.
      exit_rule: one of `exits.RULES`; if None, "gate" for a model with an exit
        gate and "fixed" otherwise.
      exit_kept: one of `exits.KEPT`, what the cache keeps of skipped loops.
      tokens_per_dispatch: see the attribute.
      prompt_chunk: maximum number of tokens of a prompt that are read at once,
        see `batching.chunk_sizes`.
      prefix_mib: MiB of memory for beginnings of prompts, see `prefixes`.

    Raises:
      UserError: a number is out of range, or the model cannot generate or has
        no such cache or exits.
    """
    checks.integer("num_slots", num_slots, 1)
    checks.integer("max_tokens", max_tokens, 2)
    checks.integer("tokens_per_dispatch", tokens_per_dispatch, 1)
    checks.integer("prompt_chunk", prompt_chunk, 2)  # Families decode with one.
    checks.integer("prefix_mib", prefix_mib, 0)
    devices = jax.tree.leaves(params)[0].devices()
    self.num_slots, self._params = num_slots, slots_lib.placed(params, devices)
    model: Any = nnx.merge(graphdef, params)
    spec, config, reading = model.spec, model.config, _reading(family)
    num_loops = config.num_loops if num_loops is None else num_loops
    checks.integer("num_loops", num_loops, 1)
    family.costs(config, spec, num_loops)  # Raises if these are too many.
    self.cache_kind = cache_kind or reading.caches[0]
    cached_model = CachedModel(
      reading,
      graphdef,
      num_loops,
      max_tokens,
      self.cache_kind,
      exit_rule or default_exit_rule(reading.exits, config),
      exit_kept,
      next(iter(devices)).platform,
    )
    cached_model.check(config)
    self.limits = batching.limits_of(cached_model, model, params)
    empty_state = functools.partial(
      slots_lib.empty_state,
      model=cached_model,
      num_slots=num_slots,
      vocab_size=spec.vocab_size,
    )
    self._state = slots_lib.placed(jax.jit(empty_state)(params), devices)
    self.cache_bytes = sum(x.nbytes for x in jax.tree.leaves(self._state.cache))
    self.prefixes = prefixes_lib.make(
      cached_model, self._params, prefix_mib, self._state.cache
    )
    self._programs, self._writer_params = program.of_params(
      cached_model, self._params, tokens_per_dispatch
    )
    self.chunk_sizes = batching.chunk_sizes(
      reading, config, spec, prompt_chunk, max_tokens
    )
    self.group_sizes = batching.powers(1, min(num_slots, MAX_PREFILLS), 2)
    self.row_sizes = self.limits.row_sizes(num_slots)
    self.tokens_per_dispatch = tokens_per_dispatch
    self._scheduler = Scheduler(num_slots)

  @property
  def idle(self) -> bool:
    """Whether there are no requests."""
    return self._scheduler.idle

  def add(self, request: GenerationRequest) -> int:
    """Queues a request; returns its id.

    Raises:
      UserError: the request is impossible with this model and cache.
    """
    self.limits.check(request)
    return self._scheduler.add(self.limits.fitted(request))

  def cancel(self, request_id: int) -> None:
    """Ends a request; no effect if it has already ended."""
    self._scheduler.cancel(request_id)

  def step(self) -> list[GeneratedToken]:
    """Prefills a chunk of some prompts, and decodes tokens in all other slots.

    After a prefill without other slots, the first tokens are returned at once:
    decoding may have to be compiled.

    Returns:
      The new tokens, in order for each request.
    """
    self._scheduler.admit()
    was_generating = bool(self._scheduler.generating)
    tokens = self._prefill() if self._scheduler.prefilling else []
    if tokens and not was_generating:
      return tokens
    return tokens + (self._decode() if self._scheduler.generating else [])

  def generate(
    self, requests: Sequence[GenerationRequest]
  ) -> list[list[GeneratedToken]]:
    """The tokens of each request, in the order of the requests.

    Raises:
      UserError: a request is impossible; none has been started.
    """
    for request in requests:
      self.limits.check(request)
    tokens: dict[int, list[GeneratedToken]] = {
      self.add(request): [] for request in requests
    }
    while not self.idle:
      for token in self.step():
        if (
          token.request_id in tokens
        ):  # Not of a request that was queued before.
          tokens[token.request_id].append(token)
    return list(tokens.values())

  def compile(self, *, prefill_loops: bool = False) -> int:
    """Runs all programs once, without any sequence; there must be no requests.

    Afterwards no request compiles anything, unless it is the first one with
    `prefill_loops` and these were not asked for. Shows the progress at a
    terminal.

    Args:
      prefill_loops: also the programs that prefill with fewer loops.

    Returns:
      The number of programs.
    """
    assert self.idle
    calls = [*self._prefills(prefill_loops), *self._decodes()]
    if self.prefixes:
      load = self.prefixes.compile
      calls += [
        functools.partial(load, size=size) for size in self.prefixes.sizes
      ]
    for call in tqdm.tqdm(
      calls, "compiling", unit="program", disable=None, leave=False
    ):
      self._state = jax.block_until_ready(call(self._state))
    return len(calls)

  def _prefills(self, fewer_loops: bool) -> Iterator[Callable[[Any], Any]]:
    """The programs that read prompts, without prompts: state -> state."""

    def run(state: Any, chunks: Any, span: int | None) -> Any:
      return self._programs.prefill(
        self._params, state, chunks, np.bool_(False), span=span
      )[0]

    for length in self.chunk_sizes:
      for group in self.group_sizes:
        chunks = self._chunks({}, group, length)
        loops: list[np.ndarray | None] = [None]
        if fewer_loops:
          loops.append(np.zeros(group, np.int32))
        for num_loops in loops:
          for span in dict.fromkeys((self.limits.span(length), None)):
            yield functools.partial(
              run, chunks=chunks._replace(num_loops=num_loops), span=span
            )

  def _decodes(self) -> Iterator[Callable[[Any], Any]]:
    """The programs that write tokens, without sequences: state -> state."""

    def run(state: Any, rows: Any, **options: Any) -> Any:
      return self._programs.decode(
        self._writer_params, state, rows, np.bool_(False), **options
      )[0]

    for size in self.row_sizes:
      rows = np.full(size, self.num_slots, np.int32)
      for span in self.limits.spans:
        for depth in self.limits.depths(size):
          yield functools.partial(run, rows=rows, span=span, depth=depth)

  def _chunks(
    self, sequences: BySlot, group: int, length: int
  ) -> slots_lib.PromptChunks:
    """The next tokens of prompts in the format of `prefill`."""
    return batching.prompt_chunks(
      sequences,
      group,
      length,
      num_slots=self.num_slots,
      num_loops=self.limits.num_loops,
    )

  def _prefill(self) -> list[GeneratedToken]:
    """Reads a chunk of every prompt whose next chunk has the oldest's size."""
    prefilling = self._scheduler.prefilling
    self._copy(prefilling)
    lengths = {
      slot: batching.fitting(self.chunk_sizes, sequence.num_unread)
      for slot, sequence in prefilling.items()
    }
    length = next(iter(lengths.values()))
    alike = [slot for slot, size in lengths.items() if size == length]
    slot_ids = alike[:MAX_PREFILLS]
    sequences = {slot: prefilling[slot] for slot in slot_ids}
    group = batching.fitting(self.group_sizes, len(slot_ids))
    chunks = self._chunks(sequences, group, length)
    has_top = _has_top(sequences.values())
    # Later chunks read the whole cache: two programs per size, not ten.
    is_later = any(sequence.num_read for sequence in sequences.values())
    self._state, generated = self._programs.prefill(
      self._params,
      self._state,
      chunks,
      np.bool_(has_top),
      span=None if is_later else self.limits.span(length),
    )
    for row, (slot, sequence) in enumerate(sequences.items()):
      sequence.num_read += int(chunks.valid[row].sum())
      if chunks.is_last[row]:
        if self.prefixes:
          self.prefixes.save(self._state, slot, sequence.request)
        self._scheduler.start_generating(slot)
    if not np.any(chunks.is_last):
      return []
    return self._collect(slots_lib.fetched(generated, has_top), slot_ids)

  def _copy(self, sequences: BySlot) -> None:
    """Copies cached prefixes to the slots of prompts that are not read yet."""
    for slot, sequence in list(sequences.items())[:MAX_PREFILLS]:
      if self.prefixes and not sequence.num_read:
        self._state, number = self.prefixes.load(
          self._state, slot, sequence.request
        )
        sequence.num_read = sequence.num_copied = number

  def _decode(self) -> list[GeneratedToken]:
    """Generates the next tokens of all sequences whose prompts were read."""
    return [
      token
      for sequences in self._scheduler.parts(self.row_sizes[-1])
      for token in self._write(sequences)
    ]

  def _write(self, sequences: BySlot) -> list[GeneratedToken]:
    """Generates the next tokens of some sequences."""
    rows = batching.rows(list(sequences), self.row_sizes, self.num_slots)
    running = sequences.values()
    has_top = _has_top(running)
    longest = max(sequence.num_tokens for sequence in running)
    self._state, generated = self._programs.decode(
      self._writer_params,
      self._state,
      rows,
      np.bool_(has_top),
      span=self.limits.span(longest + self.tokens_per_dispatch),
      depth=self.limits.depth(running),
    )
    generated = slots_lib.fetched(generated, has_top)
    slot_ids = rows.tolist()
    return [
      token
      for n in range(len(generated.valid))
      for token in self._collect(
        slots_lib.Generated(*(values[n] for values in generated)), slot_ids
      )
    ]

  def _collect(
    self, generated: slots_lib.Generated, slot_ids: Sequence[int]
  ) -> list[GeneratedToken]:
    """The tokens of one step; sequences that end leave their slots."""
    generating = self._scheduler.generating
    tokens = batching.generated_tokens(generated, slot_ids, generating)
    for slot, token in tokens.items():
      generating[slot].num_generated += 1
      if token.finish:
        self._scheduler.release(slot)
    return list(tokens.values())


def _has_top(sequences: Iterable[RunningSequence]) -> bool:
  """Whether one of them reports the most likely tokens."""
  return any(x.request.top_log_probabilities for x in sequences)


def _reading(family: Family) -> Reading:
  """How a family reads; raises UserError unless it predicts next tokens."""
  if family.reading is None:
    raise UserError("this model family does not predict next tokens")
  return family.reading
