"""Which request is in which slot; first come, first served."""

import collections
import dataclasses

from loopjax.generate.requests import GenerationRequest


@dataclasses.dataclass
class RunningSequence:
  """The progress of a request.

  Attributes:
    request_id: its id.
    request: the request.
    num_read: number of tokens of its prompt that were prefilled or copied.
    num_copied: number of tokens of its prompt that were copied.
    num_generated: number of tokens that were generated.
  """

  request_id: int
  request: GenerationRequest
  num_read: int = 0
  num_copied: int = 0
  num_generated: int = 0

  @property
  def num_tokens(self) -> int:
    """Number of tokens in the cache after prefill."""
    # The last generated token is yet to be read.
    return self.num_read + self.num_generated - 1

  @property
  def num_unread(self) -> int:
    """Number of tokens of the prompt that are not prefilled yet."""
    return len(self.request.prompt) - self.num_read


BySlot = dict[int, RunningSequence]


class Scheduler:
  """Gives slots to requests in the order in which they arrive.

  Attributes:
    prefilling: sequences in prefill, by slot, in the order of their arrival.
    generating: sequences in decoding, by slot.
  """

  def __init__(self, num_slots: int):
    self.prefilling: BySlot = {}
    self.generating: BySlot = {}
    self._waiting: collections.deque[RunningSequence] = collections.deque()
    self._free = list(range(num_slots))[::-1]
    self._next_id = 0

  @property
  def idle(self) -> bool:
    """Whether there are no requests."""
    return not (self._waiting or self.prefilling or self.generating)

  def add(self, request: GenerationRequest) -> int:
    """Queues a request; returns its id."""
    request_id = self._next_id
    self._next_id += 1
    self._waiting.append(RunningSequence(request_id, request))
    return request_id

  def cancel(self, request_id: int) -> None:
    """Ends a request; no effect if it has already ended."""
    for sequence in self._waiting:
      if sequence.request_id == request_id:
        self._waiting.remove(sequence)
        return
    for slot, sequence in (self.prefilling | self.generating).items():
      if sequence.request_id == request_id:
        self.release(slot)
        return

  def admit(self) -> None:
    """Moves waiting requests to free slots."""
    while self._free and self._waiting:
      self.prefilling[self._free.pop()] = self._waiting.popleft()

  def parts(self, max_size: int) -> list[BySlot]:
    """Groups of sequences in decoding, by slot, with a maximum size.

    The sequences of a group have similar lengths.
    """
    by_length = sorted(self.generating.items(), key=lambda x: x[1].num_tokens)
    return [
      dict(by_length[start : start + max_size])
      for start in range(0, len(by_length), max_size)
    ]

  def start_generating(self, slot: int) -> None:
    """Marks the prompt in a slot as prefilled."""
    self.generating[slot] = self.prefilling.pop(slot)

  def release(self, slot: int) -> None:
    """Frees the slot of a sequence that has ended."""
    self.prefilling.pop(slot, None)
    self.generating.pop(slot, None)
    self._free.append(slot)
