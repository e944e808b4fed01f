"""The policy that decides which checkpoints to keep."""

from collections.abc import Mapping, Sequence
from typing import Any


class NewestAndBest:
  """Keeps the newest checkpoints and those with the best scores.

  Orbax calls `should_preserve`. Its own policies could delete the newest.
  """

  def __init__(self, newest: int, best: int, scores: Mapping[int, float]):
    self._newest, self._best, self._scores = newest, best, scores

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Whether to keep each checkpoint, oldest first."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    scored = [step for step in steps if step in self._scores]
    scored.sort(key=lambda step: self._scores[step], reverse=True)
    kept = {*sorted(steps)[-self._newest :], *scored[: self._best]}
    return [step in kept for step in steps]
