"""Responses in OpenAI's format, whole or streamed, from sampled tokens."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.generate.requests import Costs, GeneratedToken
from loopjax.generate.text import TextStream
from loopjax.serve.protocol import CompletionRequest, ServedModel


class Answer:
  """The answer to one request: its choices, and the JSON that reports them.

  Attributes:
    choices: the decoded text of each choice, by index.
    prompt_scores: the tokens of each prompt after its first one, if the answer
      reports their log-probabilities.
  """

  def __init__(
    self, completion: CompletionRequest, model: ServedModel, *, chat: bool
  ):
    self.choices = [
      TextStream(model.tokenizer, completion.stops, prompt)
      for prompt in completion.prompts
      for _ in range(completion.num_choices)
    ]
    self.prompt_scores: list[list[GeneratedToken]] = []
    # All tokens of each choice, including those without text.
    self._written: list[list[GeneratedToken]] = [[] for _ in self.choices]
    self._completion, self._tokenizer = completion, model.tokenizer
    self._chat = chat
    kind = "chat.completion" if chat else "text_completion"
    self._kind = f"{kind}.chunk" if chat and completion.stream else kind
    self._head = {
      "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
      "created": int(time.time()),
      "model": model.name,
    }

  def first_chunks(self) -> list[dict[str, Any]]:
    """The first chunks of a stream: in a chat, the role of each choice."""
    if not self._chat:
      return []
    return [
      self._chunk(index, {"role": "assistant", "content": ""}, None, None)
      for index in range(len(self.choices))
    ]

  def chunks(
    self, index: int, tokens: Sequence[GeneratedToken]
  ) -> list[dict[str, Any]]:
    """The chunk for the next tokens of a choice; none if it would be empty."""
    choice = self.choices[index]
    self._written[index] += tokens
    num_before = len(choice.tokens)
    text = choice.read(tokens)
    if not text and not choice.finish:
      return []
    scores = None
    if self._completion.log_probabilities:
      scores = self._scores(choice.tokens[num_before:])
    content = {"content": text} if self._chat else text
    return [self._chunk(index, content, scores, choice.finish)]

  def costs(self) -> Costs:
    """The costs of all choices."""
    total = Costs()
    for choice in self.choices:
      total += choice.costs
    return total

  def usage(self) -> dict[str, Any]:
    """Token counts, and the mean number of loops per sampled token."""
    costs, num_prompt = self.costs(), self._completion.num_prompt_tokens
    usage: dict[str, Any] = {
      "prompt_tokens": num_prompt,
      "completion_tokens": costs.tokens,
      "total_tokens": num_prompt + costs.tokens,
      "loops_per_token": costs.loops / max(costs.tokens, 1),
    }
    # Other choices of a prompt copy it from the first one.
    firsts = self.choices[:: self._completion.num_choices]
    if copied := sum(choice.costs.copied for choice in firsts):
      usage["prompt_tokens_details"] = {"cached_tokens": copied}
    return usage

  def last_chunk(self) -> dict[str, Any]:
    """The last chunk of a stream, with the token counts."""
    return {**self._whole([]), "usage": self.usage()}

  def body(self) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    choices = []
    for index, choice in enumerate(self.choices):
      scores, before = None, ""
      number = index // self._completion.num_choices  # Of the prompt.
      if self._completion.echoed:
        before = self._completion.echoed[number]
      if self._completion.log_probabilities:
        scores = (
          self._echoed_scores(number, self._written[index])
          if self.prompt_scores
          else self._scores(choice.tokens)
        )
      content = (
        {"message": {"role": "assistant", "content": choice.text}}
        if self._chat
        else {"text": before + choice.text}
      )
      choices.append(
        {
          "index": index,
          **content,
          "logprobs": scores,
          "finish_reason": choice.finish or "length",
        }
      )
    return {**self._whole(choices), "usage": self.usage()}

  def _chunk(
    self, index: int, content: Any, scores: Any, finish: str | None
  ) -> dict[str, Any]:
    """A chunk of a stream, with new content of one choice."""
    choice = {
      "index": index,
      "delta" if self._chat else "text": content,
      "logprobs": scores,
      "finish_reason": finish,
    }
    usage = {"usage": None} if self._completion.include_usage else {}
    return {**self._whole([choice]), **usage}

  def _whole(self, choices: list[Any]) -> dict[str, Any]:
    """A response or chunk with these choices."""
    return {**self._head, "object": self._kind, "choices": choices}

  def _scores(self, tokens: Sequence[GeneratedToken]) -> Mapping[str, Any]:
    """Log-probabilities of tokens, in the format of the endpoint.

    Of alternatives with the same text, the most likely one is reported.
    "text_offset" is omitted: the length of a prompt of token ids is unknown.
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
        {self._text(one): _finite(score) for one, score in token.top[::-1]}
        for token in tokens
      ],
    }

  def _echoed_scores(
    self, number: int, tokens: Sequence[GeneratedToken]
  ) -> Mapping[str, Any]:
    """Scores of a prompt's tokens and of all after it, the end token included.

    Evaluation clients select tokens by their number. The first token of a
    prompt has no score, and 20 alternatives were computed for the others.
    """
    num_top = self._completion.num_top
    first = self._completion.prompts[number][0]
    scores = self._scores(
      [
        *(x._replace(top=x.top[:num_top]) for x in self.prompt_scores[number]),
        *tokens,
      ]
    )
    before = {"tokens": self._text(first)}
    return {name: [before.get(name), *scores[name]] for name in scores}

  def _scored(self, token: int, score: float) -> dict[str, Any]:
    """A token with its log-probability, in the format of chat completions."""
    piece = self._tokenizer.piece(token)
    return {
      "token": piece.decode(errors="backslashreplace"),
      "logprob": _finite(score),
      "bytes": list(piece),
    }

  def _text(self, token: int) -> str:
    """A token's text, or its bytes if they are not text, as OpenAI writes them.

    These are its bytes within a text; a token that is decoded by itself may
    lack the space before it.
    """
    piece = self._tokenizer.piece(token)
    try:
      return piece.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(value: float) -> float:
  """The value; -9999 for -inf, as in OpenAI's API: JSON has no infinity."""
  return value if math.isfinite(value) else -9999.0
