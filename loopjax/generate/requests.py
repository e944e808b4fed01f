"""What the engine is asked for, and what it answers."""

import dataclasses
from typing import NamedTuple

from loopjax.errors import UserError
from loopjax.generate import program
from loopjax.generate.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
  """A prompt to be continued.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: at most so many are written; fewer if the cache is full.
    sampling: how they are drawn.
    stop_tokens: the text ends with any of these, at most 8.
    top_log_probabilities: as many most likely tokens are reported with each
      token, at most 20.
    num_loops: 0 for the engine's.
    exit_threshold: see `loopjax.loop.exits`; at 1 no loop is skipped.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int
  sampling: Sampling = Sampling()
  stop_tokens: tuple[int, ...] = ()
  top_log_probabilities: int = 0
  num_loops: int = 0
  exit_threshold: float = 1.0

  def __post_init__(self) -> None:
    if not self.prompt:
      raise UserError("the prompt is empty")
    check_range("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
    top = self.top_log_probabilities
    check_range("top_log_probabilities", top, 0, program.MAX_TOP)
    if len(self.stop_tokens) > program.MAX_STOPS:
      raise UserError(
        f"{len(self.stop_tokens)} stop tokens are more than {program.MAX_STOPS}"
      )
    if not 0 < self.exit_threshold <= 1:
      raise UserError(f"exit_threshold={self.exit_threshold} not in (0, 1]")


class Token(NamedTuple):
  """A token that was drawn.

  Attributes:
    request: the number that `Engine.add` returned.
    token: its id.
    log_probability: of the model's distribution, in nats, whatever the sampling
      makes of that.
    top: the most likely tokens and their log-probabilities, as many as were
      asked for.
    loops: that the model ran for it.
    finish: None; "stop" for a stop token, "length" for the last that may be
      written.
  """

  request: int
  token: int
  log_probability: float
  top: tuple[tuple[int, float], ...]
  loops: int
  finish: str | None


def check_range(name: str, value: int, low: int, high: int) -> None:
  """Raises UserError unless `value` is an integer in [low, high]."""
  if type(value) is not int or not low <= value <= high:
    raise UserError(f"{name}={value!r} is not an integer in [{low}, {high}]")
