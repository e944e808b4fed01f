"""The loops that generated tokens cost, and the results of their drafts."""

import dataclasses

from loopjax.generate.requests import GeneratedToken


@dataclasses.dataclass
class Costs:
  """Sums over tokens.

  Attributes:
    tokens: how many.
    loops: loops after which they exited.
    computed: loops that were computed, see `GeneratedToken`.
    accepted, rejected: tokens with a draft, by its result.
    copied: cached tokens of prompts.
  """

  tokens: int = 0
  loops: int = 0
  computed: int = 0
  accepted: int = 0
  rejected: int = 0
  copied: int = 0

  def add(self, token: GeneratedToken) -> None:
    """Counts one more token."""
    self.tokens += 1
    self.loops += token.loops
    self.computed += token.computed
    self.copied += token.copied
    if token.accepted is not None:
      self.accepted += token.accepted
      self.rejected += not token.accepted

  def __iadd__(self, other: "Costs") -> "Costs":
    for field in dataclasses.fields(self):
      total = getattr(self, field.name) + getattr(other, field.name)
      setattr(self, field.name, total)
    return self

  def of_drafts(self) -> str:
    """A line on the drafts; "" if there were none."""
    drafts = self.accepted + self.rejected
    if not drafts:
      return ""
    return (
      f"drafts: {self.accepted / drafts:.1%} of {drafts} accepted;"
      f" {self.computed / self.tokens:.3f} loops computed per token"
    )
