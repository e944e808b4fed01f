"""Figures of language models: loss by position, and samples."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw
from loopjax.commands import document
from loopjax.data.text import task as text_task
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import generate_texts
from loopjax.losses import tokens as token_losses
from loopjax.run import statistics

_NUM_TEXTS = 4
_MOST_TOKENS = 256  # Maximum generated per prompt.
_TEMPERATURES = {"Greedy": 0.0, "Temperature 0.8": 0.8}


def draw_positions(
  evaluated: evaluated_lib.EvaluatedModel,
) -> list[pathlib.Path]:
  """positions.png: loss by position in the document."""
  logits, batch = evaluated.output.logits, evaluated.batch
  # Rows without numbers of documents have one each.
  documents = batch.get("documents", np.ones_like(batch["targets"]))
  targets, weights, documents = (
    x[: len(logits)] for x in (batch["targets"], batch["weights"], documents)
  )
  losses = jax.jit(token_losses.token_cross_entropy)(
    jnp.asarray(logits), jnp.asarray(targets)
  )
  edges, means, errors = by_position(np.asarray(losses), weights, documents)
  figure = draw.new(7.5, 4)
  axes = figure.subplots()
  # A bin is drawn at its geometric mean, counted from 1.
  middles = np.sqrt((edges[:-1] + 1.0) * edges[1:])
  axes.fill_between(
    middles, means - errors, means + errors, color=draw.BLUE, alpha=0.2,
    linewidth=0,
  )  # fmt: skip
  axes.plot(middles, means, color=draw.BLUE, marker="o", ms=4)
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
  draw.tidy(
    axes,
    f"Loss by position in the document, {len(logits)} rows, ±1 standard error",
    "position of the predicted token in its document or document part",
    "nats per token",
  )
  return [draw.save(figure, evaluated.directory / "positions.png")]


def by_position(
  losses: np.ndarray, weights: np.ndarray, documents: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean loss of the predictions in every octave of positions.

  Args:
    losses: [B, T].
    weights: [B, T], 0 for predictions that do not count.
    documents: ids [B, T], equal within a document; documents are contiguous.

  Returns:
    (edges int [n + 1]: bin i has the positions edges[i] .. edges[i + 1] - 1,
    counted from 0; means [n]; standard errors over rows [n]). Empty bins are
    NaN, as at the prompts of conversations; those at the end are dropped.
  """
  places = np.arange(losses.shape[1])
  starts = np.diff(documents, axis=1, prepend=-1) != 0
  first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
  octave = np.log2(places - first + 1).astype(int)
  # A last position that is a power of two does not get its own octave.
  num_octaves = int(np.ceil(np.log2(losses.shape[1])))
  octave = np.minimum(octave, num_octaves - 1)
  means, errors = [], []
  for number in range(octave[weights > 0].max(initial=0) + 1):
    in_octave = np.where(octave == number, weights, 0.0)
    mean, error = statistics.mean(
      np.sum(in_octave * losses, axis=1), in_octave.sum(axis=1)
    )
    means.append(mean)
    errors.append(error)
  edges = 2 ** np.arange(len(means) + 1) - 1
  if len(means) == num_octaves:
    edges[-1] = losses.shape[1]
  return edges, np.array(means), np.array(errors)


def draw_samples(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """samples.html: the first halves of evaluation texts, continued."""
  settings, task = evaluated.settings, evaluated.settings.task
  assert isinstance(task, text_task.Config)
  if settings.family.reading is None:
    return []
  tokenizer = tokenizer_lib.of(task)
  spec = settings.spec
  middle = spec.sequence_length // 2
  halves = evaluated_lib.halves(evaluated.batch, middle, spec.num_tokens)
  halves = halves[:_NUM_TEXTS]
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
  for number, (prompt, continuation) in enumerate(halves, 1):
    blocks += [
      document.Heading(2, f"Text {number}"),
      document.Code(_text(tokenizer, prompt)),
      document.Heading(3, "Original text"),
      document.Code(_text(tokenizer, continuation[:room])),
    ]
    for heading in _TEMPERATURES:
      blocks += [document.Heading(3, heading), document.Code(next(texts).text)]
  path = evaluated.directory / "samples.html"
  path.write_text(document.to_html("Samples", blocks), encoding="utf-8")
  return [path]


def _text(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
  """The text of token ids, without begin and end tokens."""
  around = (tokenizer.begin, tokenizer.end)
  return tokenizer.decode([one for one in ids if one not in around])
