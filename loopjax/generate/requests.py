"""Requests to the engine, and the tokens that it returns."""

import collections
import dataclasses
from typing import NamedTuple

from loopjax import checks
from loopjax.errors import UserError
from loopjax.generate.programs import slots
from loopjax.generate.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
  """A prompt to continue.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: maximum number of tokens to generate; fewer are generated if
      the cache is full.
    sampling: how tokens are sampled.
    stop_tokens: token ids that end the generation, at most 8.
    top_log_probabilities: number of most likely tokens to report with each
      generated token, at most 20.
    num_loops: maximum number of loops per token; 0 for the engine's.
    exit_threshold: see `loop.exits.ExitPolicy`; 1 for no early exits.
    prefill_loops: number of loops for all tokens of the prompt but the last,
      see `program.read_chunks`; 0 for as many as in decoding.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int
  sampling: Sampling = Sampling()
  stop_tokens: tuple[int, ...] = ()
  top_log_probabilities: int = 0
  num_loops: int = 0
  exit_threshold: float = 1.0
  prefill_loops: int = 0

  def __post_init__(self) -> None:
    if not self.prompt:
      raise UserError("the prompt is empty")
    checks.integer("max_new_tokens", self.max_new_tokens, 1)
    top = self.top_log_probabilities
    checks.integer("top_log_probabilities", top, 0, slots.MAX_TOP)
    if len(self.stop_tokens) > slots.MAX_STOPS:
      raise UserError(
        f"{len(self.stop_tokens)} stop tokens exceed the maximum of"
        f" {slots.MAX_STOPS}"
      )
    if not 0 < self.exit_threshold <= 1:
      raise UserError(f"exit_threshold={self.exit_threshold} is not in (0, 1]")


class GeneratedToken(NamedTuple):
  """A token that the engine has generated.

  Attributes:
    request_id: id of the token's request, from `Engine.add`.
    token: the token id.
    log_probability: in nats, of the model's distribution, before temperature,
      penalty and truncation.
    top: the most likely tokens of that distribution with their
      log-probabilities, as many as requested.
    loops: number of loops after which the token exited; with
      `exit_kept="computed"` the model ran all of them.
    finish: why the generation ended with this token: "stop" (a stop token) or
      "length" (the maximum number of tokens); None if it did not.
    copied: number of cached tokens of the prompt, at the first token of a text.
  """

  request_id: int
  token: int
  log_probability: float
  top: tuple[tuple[int, float], ...]
  loops: int
  finish: str | None
  copied: int = 0


@dataclasses.dataclass
class Costs:
  """The loops that generated tokens cost.

  Attributes:
    exits: how many tokens exited after each number of loops.
    copied: cached tokens of prompts.
  """

  exits: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )
  copied: int = 0

  @property
  def tokens(self) -> int:
    """How many tokens there are."""
    return self.exits.total()

  @property
  def loops(self) -> int:
    """Loops after which they exited."""
    return sum(loops * count for loops, count in self.exits.items())

  def add(self, token: GeneratedToken) -> None:
    """Counts one more token."""
    self.exits[token.loops] += 1
    self.copied += token.copied

  def __iadd__(self, other: "Costs") -> "Costs":
    for field in dataclasses.fields(self):
      total = getattr(self, field.name) + getattr(other, field.name)
      setattr(self, field.name, total)
    return self
