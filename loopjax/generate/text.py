"""Decoding of tokens to text as they are generated."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.generate.requests import Costs, GeneratedToken, GenerationRequest

_PROMPT_TOKENS = 4  # Last tokens of a prompt, with which the text is decoded.


class TextStream:
  """The text of a request, decoded as its tokens arrive.

  Attributes:
    text: the text returned so far.
    tokens: the tokens whose text is at least partly in `text`: no stop token,
      and no tokens after a stop string.
    costs: the costs of all tokens, including a stop token.
    finish: "stop" or "length" when the text has ended, otherwise None.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    prompt: Sequence[int] = (),
  ):
    """The text after a prompt, before the first of `stops`.

    Decoders may drop the space before the first token, so the first token of
    the text is decoded together with the end of its prompt. Empty strings in
    `stops` are ignored.
    """
    self.text = ""
    self.tokens: list[GeneratedToken] = []
    self.finish: str | None = None
    self.costs = Costs()
    self._tokenizer, self._stops = tokenizer, [x for x in stops if x]
    self._ids = list(prompt[-_PROMPT_TOKENS:])
    if tokenizer.decode(self._ids).endswith("\N{REPLACEMENT CHARACTER}"):
      self._ids = []  # The prompt ends within a character.
    # The range of ids that were decoded last.
    self._start, self._end = 0, len(self._ids)
    self._held = ""  # Text that may be the beginning of a stop string.
    # (where its text will begin in `text`, token) of tokens that wait for it.
    self._waiting: collections.deque[tuple[int, GeneratedToken]] = (
      collections.deque()
    )

  def read(self, tokens: Iterable[GeneratedToken]) -> str:
    """The text that the next tokens add.

    Incomplete characters and beginnings of stop strings are held back until
    later tokens decide.
    """
    before = len(self.text)
    for token in tokens:
      if self.finish:
        break
      self.costs.add(token)
      if token.finish != "stop":
        self._ids.append(token.token)
        self._waiting.append((len(self.text) + len(self._held), token))
      self.finish = token.finish
      self._held += self._decoded()
      self.text += self._released()
      while self._waiting and self._waiting[0][0] < len(self.text):
        self.tokens.append(self._waiting.popleft()[1])
    return self.text[before:]

  def _decoded(self) -> str:
    """The text of ids that are not decoded yet.

    Decoders may drop the space before the first token, so tokens are decoded
    together with those before them.
    """
    before = self._tokenizer.decode(self._ids[self._start : self._end])
    decoded = self._tokenizer.decode(self._ids[self._start :])
    if decoded.endswith("\N{REPLACEMENT CHARACTER}") and not self.finish:
      return ""  # The character is incomplete.
    self._start, self._end = self._end, len(self._ids)
    return decoded[len(before) :]

  def _released(self) -> str:
    """Removes and returns held text that cannot be part of a stop string."""
    positions = [self._held.find(stop) for stop in self._stops]
    cuts = [cut for cut in positions if cut >= 0]
    if cuts:
      self.finish, cut = "stop", min(cuts)
    elif self.finish:
      cut = len(self._held)
    else:
      cut = len(self._held) - max(map(self._overlap, self._stops), default=0)
    released, self._held = self._held[:cut], self._held[cut:]
    return released

  def _overlap(self, stop: str) -> int:
    """Length of the longest prefix of a stop string that ends the held text."""
    sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
    return next((n for n in sizes if self._held.endswith(stop[:n])), 0)


def generate_texts(
  engine: Engine,
  tokenizer: Tokenizer,
  requests: Sequence[GenerationRequest],
  stops: Sequence[str] = (),
) -> list[TextStream]:
  """The texts of requests, in their order; each ends before any of `stops`."""
  return list(each_text(engine, tokenizer, requests, stops))


def each_text(
  engine: Engine,
  tokenizer: Tokenizer,
  requests: Sequence[GenerationRequest],
  stops: Sequence[str],
  notice: Callable[[Sequence[GeneratedToken]], object] = len,
) -> Iterator[TextStream]:
  """Yields the results of `generate_texts` as they become available.

  `notice` is called with the tokens of every step of the engine. An error, or
  the end of the generator, cancels the texts that have not ended.
  """
  texts: dict[int, TextStream] = {}
  try:
    for request in requests:
      text = TextStream(tokenizer, stops, request.prompt)
      texts[engine.add(request)] = text
    waiting = list(texts)[::-1]
    while waiting:
      tokens = engine.step()
      notice(tokens)
      for token in tokens:
        text = texts[token.request_id]
        text.read([token])
        if text.finish and not token.finish:
          engine.cancel(token.request_id)
      while waiting and texts[waiting[-1]].finish:
        yield texts[waiting.pop()]
  finally:
    for number, text in texts.items():
      if not text.finish:
        engine.cancel(number)
