"""Loss by a token's position in its document."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw
from loopjax.losses import tokens as token_losses


def draw_positions(
  evaluated: evaluated_lib.EvaluatedModel,
) -> list[pathlib.Path]:
  """positions.png: loss by position in the document."""
  logits = evaluated.output.logits
  targets, weights, documents = (
    np.asarray(evaluated.batch[name][: len(logits)])
    for name in ("targets", "weights", "documents")
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
    counted from 0; means [n]; standard errors over rows [n]). Empty bins at the
    end are dropped.
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
    here = np.where(octave == number, weights, 0.0)
    mean = np.sum(here * losses) / max(np.sum(here), 1e-9)
    # Rows are independent, but tokens of a row are not: error of a ratio of
    # sums.
    off = np.sum(here * (losses - mean), axis=1)
    means.append(mean)
    errors.append(np.sqrt(np.sum(off**2)) / max(np.sum(here), 1e-9))
  edges = 2 ** np.arange(len(means) + 1) - 1
  if len(means) == num_octaves:
    edges[-1] = losses.shape[1]
  return edges, np.array(means), np.array(errors)
