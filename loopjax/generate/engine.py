"""Many texts at once: a batch whose slots pass from text to text.

A request waits until a slot is free. Its prompt is read in parts into the slot
while the others go on, then it is written token by token until it ends. What a
text says depends on its own request alone, up to the rounding of sums.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from loopjax.errors import UserError
from loopjax.generate import program, sizes
from loopjax.generate import sampling as sampling_lib
from loopjax.generate.requests import GenerationRequest as GenerationRequest
from loopjax.generate.requests import Token, check_range
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits
from loopjax.protocols import CausalFamily, ExitsEarly

_FINISH = {program.STOP: "stop", program.LENGTH: "length"}
MOST_PROMPTS = 4  # That are read at once: their rows of the cache are copied.


@dataclasses.dataclass
class _Text:
  """A request in a slot, how much of its prompt was read, and what written."""

  number: int
  request: GenerationRequest
  num_read: int = 0
  num_written: int = 0


class Engine:
  """Continues prompts with a model.

  Attributes:
    num_slots: texts that are written at once.
    max_tokens: of a prompt and what is written after it; None for any number,
      with a family whose memory does not grow.
    num_loops: that a token runs at most.
    cache_kind: a kind of the family's.
    exit_rule: when a row exits earlier, see `loop.exits.ExitPolicy`.
    cache_bytes: size of the cache.
  """

  def __init__(
    self,
    family: CausalFamily,
    graphdef: nnx.GraphDef,
    params: Any,
    *,
    num_slots: int,
    max_tokens: int,
    num_loops: int | None = None,
    cache_kind: str | None = None,
    prompt_tokens: int = 0,
    exit_rule: str | None = None,
    exit_kept: str = "copy",
    tokens_per_dispatch: int = 8,
    prompt_part: int = 256,
  ):
    """Makes the cache; programs are compiled when they are first needed.

    Args:
      family: of the model, a value of `loopjax.models.CAUSAL`.
      graphdef: the model without its parameters.
      params: its parameters.
      num_slots: B, texts that are written at once.
      max_tokens: M, of a text.
      num_loops: the trained number if None.
      cache_kind: one of the family's CACHES; the first if None.
      prompt_tokens: of M, for prompts, which then keep every loop's keys and
        values where the rest shares them; 0 for prompts that share them, too.
      exit_rule: one of `exits.RULES`; the gate, if None and there is one.
      exit_kept: one of `exits.KEPT`, what a skipped loop leaves in the cache.
      tokens_per_dispatch: that are drawn between two looks at them.
      prompt_part: tokens of a prompt that are read at once, see `sizes.parts`.

    Raises:
      UserError: a number, the cache kind or the exits are not possible.
    """
    for name, value, least in (
      ("num_slots", num_slots, 1),
      ("max_tokens", max_tokens, 2),
      ("tokens_per_dispatch", tokens_per_dispatch, 1),
      ("prompt_part", prompt_part, 2),  # Families decode one.
    ):
      check_range(name, value, least, 2**31 - 1)
    devices = jax.tree.leaves(params)[0].devices()
    self.num_slots, self._params = num_slots, _placed(params, devices)
    model: Any = nnx.merge(graphdef, params)
    spec, config = model.spec, model.config
    self._num_tokens = spec.vocab_size - spec.num_padding_tokens
    self.num_loops = config.num_loops if num_loops is None else num_loops
    check_range("num_loops", self.num_loops, 1, 2**31 - 1)
    family.costs(config, spec, self.num_loops)  # Raises if that is too many.
    self.cache_kind = cache_kind or family.CACHES[0]
    self.has_exits = isinstance(family, ExitsEarly)
    if not exit_rule and isinstance(family, ExitsEarly):
      exit_rule = family.exit_rule(config)
    self.exit_rule = exit_rule or "fixed"
    reader = program.Reader(
      family,
      graphdef,
      self.num_loops,
      max_tokens,
      prompt_tokens,
      self.cache_kind,
      self.exit_rule,
      exit_kept,
      next(iter(devices)).platform,
    )
    _check_kinds(reader, config)
    self.max_tokens = max_tokens if sizes.grows(reader, params) else None
    self._prompt_tokens = prompt_tokens
    make = jax.jit(
      functools.partial(
        program.empty_state,
        reader=reader,
        num_slots=num_slots,
        vocab_size=spec.vocab_size,
      )
    )
    self._state = _placed(make(params), devices)
    self.cache_bytes = sum(x.nbytes for x in jax.tree.leaves(self._state.cache))
    self._programs = program.programs(
      reader, reader.batch_axes(params), tokens_per_dispatch
    )
    self._parts = sizes.parts(config, spec, prompt_part, max_tokens)
    self._groups = sizes.powers(1, min(num_slots, MOST_PROMPTS))
    self._tokens_per_dispatch = tokens_per_dispatch
    self._waiting: collections.deque[_Text] = collections.deque()
    self._reading: dict[int, _Text] = {}  # By slot, in order of arrival.
    self._writing: dict[int, _Text] = {}
    self._free, self._next_number = list(range(num_slots))[::-1], 0

  def add(self, request: GenerationRequest) -> int:
    """Queues a request; returns its number.

    Raises:
      UserError: it is impossible with this model and cache.
    """
    self._check(request)
    number = self._next_number
    self._next_number += 1
    self._waiting.append(_Text(number, request))
    return number

  def cancel(self, number: int) -> None:
    """Ends a request, wherever it is; one that has ended is no error."""
    for text in self._waiting:
      if text.number == number:
        self._waiting.remove(text)
        return
    for texts in (self._reading, self._writing):
      for slot, text in texts.items():
        if text.number == number:
          self._release(texts, slot)
          return

  @property
  def idle(self) -> bool:
    """Whether there is nothing to do."""
    return not (self._waiting or self._reading or self._writing)

  def step(self) -> list[Token]:
    """Reads on and writes on; the new tokens, those of a text in order."""
    while self._free and self._waiting:
      self._reading[self._free.pop()] = self._waiting.popleft()
    found = self._read_on() if self._reading else []
    return found + (self._write_on() if self._writing else [])

  def generate(
    self, requests: Sequence[GenerationRequest]
  ) -> list[list[Token]]:
    """The tokens of each request, in their order."""
    for request in requests:
      self._check(request)
    found: dict[int, list[Token]] = {self.add(one): [] for one in requests}
    while not self.idle:
      for token in self.step():
        if token.request in found:  # Others may have been there before.
          found[token.request].append(token)
    return list(found.values())

  def room_after(self, num_prompt: int) -> int | None:
    """Tokens that can be written after a prompt; None for any number."""
    if self.max_tokens is None:
      return None
    # The last one is not read.
    return self.max_tokens - (self._prompt_tokens or num_prompt) + 1

  def _check(self, request: GenerationRequest) -> None:
    """Raises UserError for what cannot be done here."""
    wrong = [x for x in request.prompt if not 0 <= x < self._num_tokens]
    if wrong:
      raise UserError(
        f"the prompt has a token {wrong[0]}; there are {self._num_tokens}"
      )
    room = self._prompt_tokens or self.max_tokens
    if room and len(request.prompt) > room:
      raise UserError(
        f"the prompt has {len(request.prompt)} tokens, and the cache has room"
        f" for {room}"
      )
    least = 1 if self.has_exits else self.num_loops
    if request.num_loops and not least <= request.num_loops <= self.num_loops:
      raise UserError(
        f"num_loops={request.num_loops} is not in [{least}, {self.num_loops}]"
      )
    if request.exit_threshold < 1 and self.exit_rule == "fixed":
      raise UserError(
        f"exit_threshold={request.exit_threshold} has no effect on a fixed"
        " number of loops"
      )

  def _read_on(self) -> list[Token]:
    """Reads a part of prompts whose parts are about as long."""
    parts = {slot: self._part(text) for slot, text in self._reading.items()}
    length = next(iter(parts.values()))  # Of the one that came first.
    slots = [slot for slot, part in parts.items() if part == length]
    slots = slots[:MOST_PROMPTS]
    num_rows = next(size for size in self._groups if size >= len(slots))
    texts = [self._reading[slot] for slot in slots]
    prompts = _prompts(texts, slots, num_rows, length, self)
    num_top = max(text.request.top_log_probabilities for text in texts)
    self._state, record = self._programs.prefill(
      self._params,
      self._state,
      prompts,
      num_top=program.MAX_TOP if num_top else 0,
      # Later parts look at all places: two programs for each size, not ten.
      span=None if any(text.num_read for text in texts) else self._span(length),
    )
    for row, (slot, text) in enumerate(zip(slots, texts, strict=True)):
      text.num_read += int(prompts.valid[row].sum())
      if prompts.is_last[row]:
        self._writing[slot] = self._reading.pop(slot)
    if not np.any(prompts.is_last):
      return []
    return self._tokens(jax.device_get(record), slots)

  def _write_on(self) -> list[Token]:
    """Draws the next tokens of all texts."""
    kept = np.zeros(self.num_slots, bool)
    kept[list(self._writing)] = True
    texts = self._writing.values()
    num_top = max(text.request.top_log_probabilities for text in texts)
    # The last token that was written is yet to be read.
    longest = max(text.num_read + text.num_written for text in texts) - 1
    self._state, records = self._programs.decode(
      self._params,
      self._state,
      kept,
      num_top=program.MAX_TOP if num_top else 0,
      span=self._span(longest + self._tokens_per_dispatch),
      early=any(text.request.exit_threshold < 1 for text in texts),
    )
    records, slots = jax.device_get(records), list(range(self.num_slots))
    found = []
    for n in range(len(records.drawn)):
      record = program.Record(*(values[n] for values in records))
      found += self._tokens(record, slots)
    return found

  def _tokens(
    self, record: program.Record, slots: Sequence[int]
  ) -> list[Token]:
    """Tokens of rows that are in slots; texts that end leave theirs."""
    found = []
    for row in np.flatnonzero(record.drawn).tolist():
      text = self._writing[slots[row]]
      text.num_written += 1
      num_top = text.request.top_log_probabilities
      finish = _FINISH.get(int(record.finish[row]))
      top = zip(
        record.top_tokens[row, :num_top].tolist(),
        record.top_log_probabilities[row, :num_top].tolist(),
        strict=True,
      )
      found.append(
        Token(
          request=text.number,
          token=int(record.token[row]),
          log_probability=float(record.log_probability[row]),
          top=tuple(top),
          loops=int(record.loops[row]),
          finish=finish,
        )
      )
      if finish:
        self._release(self._writing, slots[row])
    return found

  def _span(self, num_tokens: int) -> int | None:
    """Places to look at for rows of so many tokens; None for all."""
    most = self.max_tokens
    return None if most is None else sizes.span(num_tokens, most)

  def _release(self, texts: dict[int, _Text], slot: int) -> None:
    """Makes room in a slot."""
    del texts[slot]
    self._free.append(slot)

  def _part(self, text: _Text) -> int:
    """Places for the next part of a prompt."""
    left = len(text.request.prompt) - text.num_read
    fits = [size for size in self._parts if size >= left]
    return fits[0] if fits else self._parts[-1]


def _placed(tree: Any, devices: set[jax.Device]) -> Any:
  """Sharded as programs' results, so that they are not compiled again."""
  return jax.device_put(tree, *devices) if len(devices) == 1 else tree


def _prompts(
  texts: Sequence[_Text],
  slots: Sequence[int],
  num_rows: int,
  length: int,
  engine: Engine,
) -> program.Prompts:
  """The next `length` tokens of texts, as arrays on the host."""
  tokens = np.zeros((num_rows, length), np.int32)
  valid = np.zeros((num_rows, length), bool)
  left = np.zeros(num_rows, np.int32)
  place = np.zeros(num_rows, np.int32)
  stops = np.full((num_rows, program.MAX_STOPS), -1, np.int32)
  is_first, is_last = np.zeros((2, num_rows), bool)
  num_loops = np.full(num_rows, engine.num_loops, np.int32)
  threshold = np.ones(num_rows, np.float32)
  for row, text in enumerate(texts):
    request, start = text.request, text.num_read
    part = request.prompt[start : start + length]
    tokens[row, : len(part)] = part
    valid[row, : len(part)] = True
    is_first[row] = start == 0
    is_last[row] = start + len(part) == len(request.prompt)
    place[row] = len(request.prompt)
    if is_last[row]:  # Until then there is nothing to write.
      left[row] = request.max_new_tokens
      room = engine.room_after(len(request.prompt))
      left[row] = left[row] if room is None else min(left[row], room)
    stops[row, : len(request.stop_tokens)] = request.stop_tokens
    num_loops[row] = request.num_loops or engine.num_loops
    threshold[row] = request.exit_threshold
  none = [Sampling()] * (num_rows - len(texts))
  slots = [*slots, *[engine.num_slots] * len(none)]
  return program.Prompts(
    tokens=tokens,
    valid=valid,
    slots=np.array(slots, np.int32),
    is_first=is_first,
    is_last=is_last,
    rows=program.Rows(
      token=np.zeros(num_rows, np.int32),
      place=place,
      left=left,
      seen=np.zeros((num_rows, 0), bool),
      stops=stops,
      sampling=sampling_lib.rows(
        [*(text.request.sampling for text in texts), *none]
      ),
      num_loops=num_loops,
      exit_threshold=threshold,
    ),
  )


def _check_kinds(reader: program.Reader, config: Any) -> None:
  """Raises UserError for a cache or exits that the family does not have."""
  family, kind = reader.family, reader.kind
  rules = exits.RULES if isinstance(family, ExitsEarly) else ("fixed",)
  for name, value, there_are in (
    ("cache_kind", kind, family.CACHES),
    ("exit_rule", reader.rule, rules),
    ("exit_kept", reader.kept, exits.KEPT),
  ):
    if value not in there_are:
      raise UserError(
        f"{name}={value!r} is not one of {', '.join(there_are)} for this model"
      )
  check_range("prompt_tokens", reader.prompt_tokens, 0, reader.max_tokens - 1)
  if reader.prompt_tokens and kind == family.CACHES[0]:
    raise UserError(
      f"prompt_tokens={reader.prompt_tokens} has no effect on a cache of kind"
      f" {kind!r}"
    )
  if isinstance(family, ExitsEarly):
    family.check_exits(config, reader.rule, reader.kept, kind)
