"""Samples: a language model's continuations of evaluation texts."""

import pathlib

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import prompts
from loopjax.commands import document
from loopjax.data.text import task as text_task
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import generate_texts

_NUM_TEXTS = 4
_MOST_TOKENS = 256  # Maximum generated per prompt.
_TEMPERATURES = {"Greedy": 0.0, "Temperature 0.8": 0.8}


def draw_samples(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """samples.html: the first halves of evaluation texts, continued."""
  settings, task = evaluated.settings, evaluated.settings.task
  assert isinstance(task, text_task.Config)
  if settings.family.reading is None:
    return []
  tokenizer = tokenizer_lib.of(task)
  spec = settings.spec
  middle = spec.sequence_length // 2
  num_tokens = spec.vocab_size - spec.num_padding_tokens
  halves = prompts.halves(evaluated.batch, middle, num_tokens)[:_NUM_TEXTS]
  if not halves:
    return []
  room = min(middle, _MOST_TOKENS)
  requests = [
    GenerationRequest(
      prompt, room, Sampling(temperature, seed=seed), (tokenizer.end,)
    )
    for seed, (prompt, _) in enumerate(halves)
    for temperature in _TEMPERATURES.values()
  ]
  engine = Engine(
    settings.family,
    evaluated.graphdef,
    evaluated.params,
    num_slots=len(requests),
    max_tokens=spec.sequence_length,
    num_loops=settings.eval_loops,
  )
  texts = iter(generate_texts(engine, tokenizer, requests))
  blocks: list[document.Block] = [
    document.Heading(1, "Samples"),
    document.Paragraph(
      "Evaluation texts, and the model's continuations of their first halves: "
      f"up to {room} tokens with {settings.eval_loops} loops."
    ),
  ]
  for number, (prompt, rest) in enumerate(halves, 1):
    blocks += [
      document.Heading(2, f"Text {number}"),
      document.Code(_text(tokenizer, prompt)),
      document.Heading(3, "Original text"),
      document.Code(_text(tokenizer, rest[:room])),
    ]
    for heading in _TEMPERATURES:
      blocks += [
        document.Heading(3, heading),
        document.Code(next(texts).text),
      ]
  path = evaluated.directory / "samples.html"
  path.write_text(document.to_html("Samples", blocks))
  return [path]


def _text(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
  """The text of token ids, without begin and end tokens."""
  around = (tokenizer.begin, tokenizer.end)
  return tokenizer.decode([one for one in ids if one not in around])
