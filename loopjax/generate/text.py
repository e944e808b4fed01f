"""Tokens to text, as they arrive."""

from collections.abc import Iterable, Sequence

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest, Token

_PROMPT_TOKENS = 4  # Of a prompt that its text is decoded after.


class Text:
  """A text that is being written.

  Attributes:
    text: what of it has been given out.
    num_tokens: that were drawn, one that ends it included.
    num_loops: that the model ran for them.
    finish: "stop" or "length" once it has ended.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    prompt: Sequence[int] = (),
  ):
    """Ends before the first of `stops`, of which empty ones are ignored.

    Decoders may drop the space before a first token: the text's first one is
    decoded after the end of its prompt.
    """
    self.text = ""
    self.finish: str | None = None
    self.num_tokens = self.num_loops = 0
    self._tokenizer, self._stops = tokenizer, [x for x in stops if x]
    self._ids = list(prompt[-_PROMPT_TOKENS:])
    if tokenizer.decode(self._ids).endswith("\N{REPLACEMENT CHARACTER}"):
      self._ids = []  # Part of a character: the text is no whole one then.
    self._start, self._end = 0, len(self._ids)  # Of what was decoded last.
    self._held = ""  # It may be the beginning of a stop.

  def read(self, tokens: Iterable[Token]) -> str:
    """What the next tokens add: no half characters, and no part of a stop."""
    added = ""
    for token in tokens:
      if self.finish:
        break
      self.num_tokens += 1
      self.num_loops += token.loops
      if token.finish != "stop":
        self._ids.append(token.token)
      self.finish = token.finish
      self._held += self._decoded()
      added += self._released()
    self.text += added
    return added

  def _decoded(self) -> str:
    """Text of the ids that are not decoded yet, after those before them."""
    before = self._tokenizer.decode(self._ids[self._start : self._end])
    now = self._tokenizer.decode(self._ids[self._start :])
    if now.endswith("\N{REPLACEMENT CHARACTER}") and not self.finish:
      return ""  # The rest of the character is yet to come.
    self._start, self._end = self._end, len(self._ids)
    return now[len(before) :]

  def _released(self) -> str:
    """Takes out of the held text what is sure to be before a stop."""
    found = [self._held.find(stop) for stop in self._stops]
    cuts = [cut for cut in found if cut >= 0]
    if cuts:
      self.finish, cut = "stop", min(cuts)
    elif self.finish:
      cut = len(self._held)
    else:
      cut = len(self._held) - max(map(self._begun, self._stops), default=0)
    released, self._held = self._held[:cut], self._held[cut:]
    return released

  def _begun(self, stop: str) -> int:
    """Characters of a stop that the held text ends with."""
    sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
    return next((n for n in sizes if self._held.endswith(stop[:n])), 0)


def write(
  engine: Engine,
  tokenizer: Tokenizer,
  requests: Sequence[GenerationRequest],
  stops: Sequence[str] = (),
) -> list[Text]:
  """The texts of requests, in their order; each ends before a stop, too."""
  texts = {
    engine.add(one): Text(tokenizer, stops, one.prompt) for one in requests
  }
  while not engine.idle:
    for token in engine.step():
      text = texts[token.request]
      text.read([token])
      if text.finish and not token.finish:
        engine.cancel(token.request)
  return list(texts.values())
