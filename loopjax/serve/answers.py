"""Responses in OpenAI's format: sampled tokens to JSON, whole or streamed."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.requests import Token
from loopjax.generate.text import Text
from loopjax.serve.protocol import Ask


class Answer:
  """The choices of one request and the JSON that reports them.

  Attributes:
    choices: the decoded text of each choice, by index.
  """

  def __init__(self, ask: Ask, tokenizer: Tokenizer, *, model: str, chat: bool):
    self.choices = [
      Text(tokenizer, ask.stops, one.prompt) for one in ask.requests
    ]
    self._ask, self._tokenizer, self._chat = ask, tokenizer, chat
    kind = "chat.completion" if chat else "text_completion"
    self._kind = f"{kind}.chunk" if chat and ask.stream else kind
    self._head = {
      "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
      "created": int(time.time()),
      "model": model,
    }
    self._tokens: list[list[Token]] = [[] for _ in self.choices]

  def beginning(self) -> list[dict[str, Any]]:
    """The first chunks of a stream: in a chat, the role of each choice."""
    if not self._chat:
      return []
    return [
      self._part(index, {"role": "assistant", "content": ""}, None, None)
      for index in range(len(self.choices))
    ]

  def parts(self, index: int, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """The chunk for the next tokens of a choice; none if it adds nothing."""
    choice = self.choices[index]
    counted = choice.num_tokens
    text = choice.read(tokens)
    read = tokens[: choice.num_tokens - counted]
    self._tokens[index] += read
    shown = self._ask.log_probabilities
    if not text and not choice.finish and not shown:
      return []
    scores = self._scores(read) if shown else None
    content = {"content": text} if self._chat else text
    return [self._part(index, content, scores, choice.finish)]

  def usage(self) -> dict[str, Any]:
    """Token counts, and the mean number of loops run per sampled token."""
    written = sum(choice.num_tokens for choice in self.choices)
    loops = sum(choice.num_loops for choice in self.choices)
    return {
      "prompt_tokens": self._ask.num_prompt_tokens,
      "completion_tokens": written,
      "total_tokens": self._ask.num_prompt_tokens + written,
      "loops_per_token": loops / max(written, 1),
    }

  def final(self) -> dict[str, Any]:
    """The last chunk of a stream, which reports the token counts."""
    return {**self._whole([]), "usage": self.usage()}

  def body(self) -> dict[str, Any]:
    """The whole response, when it is not streamed."""
    choices = []
    for index, choice in enumerate(self.choices):
      scores = None
      if self._ask.log_probabilities:
        scores = self._scores(self._tokens[index])
      said = (
        {"message": {"role": "assistant", "content": choice.text}}
        if self._chat
        else {"text": choice.text}
      )
      choices.append(
        {
          "index": index,
          **said,
          "logprobs": scores,
          "finish_reason": choice.finish,
        }
      )
    return {**self._whole(choices), "usage": self.usage()}

  def _part(
    self, index: int, content: Any, scores: Any, finish: str | None
  ) -> dict[str, Any]:
    choice = {
      "index": index,
      "delta" if self._chat else "text": content,
      "logprobs": scores,
      "finish_reason": finish,
    }
    return self._whole([choice])

  def _whole(self, choices: list[Any]) -> dict[str, Any]:
    return {**self._head, "object": self._kind, "choices": choices}

  def _scores(self, tokens: Sequence[Token]) -> Mapping[str, Any]:
    """Log-probabilities of tokens, in the endpoint's format.

    "text_offset" is absent: a token decoded by itself may lack the space before
    it, so offsets would be wrong.
    """
    if self._chat:
      return {
        "content": [
          {
            **self._scored(token.token, token.log_probability),
            "top_logprobs": [self._scored(*one) for one in token.top],
          }
          for token in tokens
        ]
      }
    return {
      "tokens": [self._text(token.token) for token in tokens],
      "token_logprobs": [_finite(token.log_probability) for token in tokens],
      "top_logprobs": [
        {self._text(one): _finite(score) for one, score in token.top}
        for token in tokens
      ],
    }

  def _scored(self, token: int, score: float) -> dict[str, Any]:
    text = self._text(token)
    known = list(text.encode()) if "\ufffd" not in text else None
    if token < 256 and self._tokenizer.name == "bytes":
      known = [token]
    return {"token": text, "logprob": _finite(score), "bytes": known}

  def _text(self, token: int) -> str:
    """The text of one token decoded by itself; "" for the end token."""
    if token == self._tokenizer.end:
      return ""
    return self._tokenizer.decode([token])


def _finite(value: float) -> float:
  """The value, or -9999 (as OpenAI reports -inf); JSON has no infinity."""
  return value if math.isfinite(value) else -9999.0
