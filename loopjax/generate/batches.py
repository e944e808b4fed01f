"""Converts running sequences to arrays for the programs, and back to tokens."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from loopjax.generate import sampling
from loopjax.generate.limits import Limits
from loopjax.generate.programs import sizes, slots
from loopjax.generate.requests import GeneratedToken
from loopjax.generate.sampling import Sampling
from loopjax.generate.scheduler import RunningSequence

_FINISH = {slots.STOP: "stop", slots.LENGTH: "length"}


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
  size = sizes.fitting(row_sizes, len(slot_ids))
  row_slots = np.full(size, num_slots, np.int32)
  places = slot_ids if size == num_slots else range(len(slot_ids))
  row_slots[list(places)] = slot_ids
  return row_slots


def depth(running: Collection[RunningSequence], limits: Limits) -> str:
  """One of `slots.DEPTHS`, for sequences that decode together."""
  requests = [sequence.request for sequence in running]
  loops = {request.num_loops or limits.num_loops for request in requests}
  if any(request.exit_threshold < 1 for request in requests):
    return slots.EXITS
  if loops != {limits.num_loops}:
    return slots.LOOPS
  return limits.depth(len(requests))


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
