"""Texts that a language model writes, next to those that people wrote."""

import pathlib

import numpy as np

from loopjax import document
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.data.text import task as text_task
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import write
from loopjax.models import CAUSAL

_NUM_TEXTS = 4
_MOST_TOKENS = 256  # Written after a prompt.
_TEMPERATURES = {"The likeliest token each time": 0.0, "Temperature 0.8": 0.8}


def draw_samples(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """samples.html: evaluation texts, continued from the middle of a row."""
  settings, task = evaluated.settings, evaluated.settings.task
  name = settings.plain["model"]["name"]
  assert isinstance(task, text_task.Config)
  if name not in CAUSAL:
    return []
  tokenizer = Tokenizer(task.tokenizer, task.end_token)
  weights = evaluated.batch["weights"]
  middle = weights.shape[1] // 2
  chosen = np.flatnonzero(weights[:, middle - 1] > 0)[:_NUM_TEXTS]
  rows = [prompt_and_rest(evaluated.batch, row) for row in chosen.tolist()]
  if not rows:
    return []
  room = min(middle, _MOST_TOKENS)
  requests = [
    GenerationRequest(
      prompt, room, Sampling(temperature, seed=seed), (tokenizer.end,)
    )
    for seed, (prompt, _) in enumerate(rows)
    for temperature in _TEMPERATURES.values()
  ]
  engine = Engine(
    CAUSAL[name],
    evaluated.graphdef,
    evaluated.params,
    num_slots=len(requests),
    max_tokens=settings.spec.sequence_length,
    num_loops=settings.eval_loops,
  )
  texts = iter(write(engine, tokenizer, requests))
  blocks: list[document.Block] = [
    document.Heading(1, "Samples"),
    document.Paragraph(
      f"Texts of the evaluation, and what the model writes after the first"
      f" part: up to {room} tokens, with {engine.num_loops} loops each."
    ),
  ]
  for number, (prompt, rest) in enumerate(rows, 1):
    blocks += [
      document.Heading(2, f"Text {number}"),
      document.Code(_text(tokenizer, prompt)),
      document.Heading(3, "The text itself goes on"),
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


def prompt_and_rest(batch, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """A document of a row, up to the middle of the row and after it.

  Args:
    batch: evaluation examples, "inputs" and "documents" [N, T].
    row: of the batch.

  Returns:
    Token ids of the document that the middle of the row falls into, at least
    one, and those of the same document after it, which may be none.
  """
  inputs, documents = batch["inputs"][row], batch["documents"][row]
  middle = len(inputs) // 2
  places = np.flatnonzero(documents == documents[middle - 1])
  before, after = places[places < middle], places[places >= middle]
  return tuple(inputs[before].tolist()), tuple(inputs[after].tolist())


def _text(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
  """Text of ids without the token between documents."""
  return tokenizer.decode([one for one in ids if one != tokenizer.end])
