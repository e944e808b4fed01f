"""Scores after every loop, up to and beyond the trained depth."""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib import axes as axes_lib
from matplotlib import ticker

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw, series
from loopjax.losses import tokens as token_losses
from loopjax.models import every_loop
from loopjax.program import step
from loopjax.run import statistics
from loopjax.types import Array, Batch, Output, TokenScores

_ERROR = "/standard_error"
# Values and weights of each row after each loop, [K, B] each.
Scores = dict[str, tuple[Any, Any]]


def scores_by_depth(
  evaluated: evaluated_lib.EvaluatedModel,
) -> dict[str, np.ndarray]:
  """Scores of head(g_k) for every k (UTM, section 5.2 and figure 7).

  Over `eval.depth_examples` examples, up to `eval.depth_factor` times the
  trained number of loops, or to that of the evaluation if it is larger. Models
  that read out every loop run once; a forced stop, if the model has one, moves
  to the new last loop. Other causal models run again for 1, 2, 4, ... loops.

  Returns:
    "<score>" and "<score>/standard_error", f64 [K], entry k after k + 1 loops,
    NaN for loops that were not run; K is the largest number of loops. Causal
    models that read out every loop also have the state's, of
    `every_loop.STATE`; and the family's `measures`. If the task has several
    evaluation splits, "<split>/<score>" for each that has examples. {} if they
    are disabled, or the model has no predictions of loops.
  """
  settings, family = evaluated.settings, evaluated.settings.family
  shows = "prediction" in family.traces or family.reading
  if not settings.eval.depth_factor or not shows:
    return {}
  num_examples = settings.eval.depth_examples or None
  batch = {name: x[:num_examples] for name, x in evaluated.batch.items()}
  num_loops = settings.eval.depth_factor * settings.model.num_loops
  num_loops = max(num_loops, settings.eval_loops)
  reads_out = family.reads_out_every_loop
  if reads_out and reads_out(settings.model):
    scores = _run(evaluated, batch, num_loops, every=True)
  elif family.reading:
    scores = _by_runs(evaluated, batch, num_loops)
  else:
    output = evaluated.forward(
      ("prediction",), num_loops=num_loops, num_examples=num_examples
    )
    scores = scores_by_loop(
      settings.task_module.score,
      output.trace["prediction"],
      batch,
      evaluated.spec.vocab_size,
    )
  result: dict[str, np.ndarray] = {}
  parts: dict[str, Any] = {"": slice(None)}
  if evaluated.splits:
    parts = {
      f"{split}/": np.flatnonzero(batch["group/split"] == index)
      for index, split in enumerate(evaluated.splits)
    }
  for prefix, rows in parts.items():
    of_rows = means(scores, rows)
    result |= {f"{prefix}{name}": x for name, x in of_rows.items()}
  if family.measures:
    model = nnx.merge(evaluated.graphdef, evaluated.params)
    measured = jax.device_get(family.measures(model))
    result |= jax.tree.map(np.float64, measured)
  return result


def scores_by_loop(
  score: Callable[[Output, Batch], dict[str, Any]],
  prediction: Array,
  batch: Batch,
  vocab_size: int,
  losses: Array | None = None,
) -> Scores:
  """A task's scores with each loop's predictions as the answer.

  Args:
    score: the task's `score`; it receives the predictions as one-hot logits.
    prediction: token ids, int [K, B, T].
    losses: f32 [K, B, T], nats; without them there is no "loss", which one-hot
      predictions lack.
  """

  def score_one(of_loop: tuple[Array, Array | None]) -> dict[str, Any]:
    prediction, losses = of_loop
    logits = jax.nn.one_hot(prediction, vocab_size)
    tokens = None if losses is None else TokenScores(losses, prediction)
    values = score(Output(logits, {}, {}, {}, {}, tokens=tokens), batch)
    if losses is None:
      values.pop("loss", None)
    return {
      name: x if isinstance(x, tuple) else (x, jnp.ones_like(x))
      for name, x in values.items()
    }

  each = jnp.asarray(prediction), losses
  return jax.jit(lambda each: jax.lax.map(score_one, each))(each)


def means(scores: Scores, rows: Any = slice(None)) -> dict[str, np.ndarray]:
  """Weighted means and standard errors over rows, f64 [K], as in evaluations.

  `rows` selects the rows to use; without their weight there is no score.
  """
  result: dict[str, np.ndarray] = {}
  for name, both in scores.items():
    values, weights = (np.asarray(x, np.float64)[:, rows] for x in both)
    if weights.any():
      mean, error = statistics.mean(weights * values, weights)
      result |= {name: mean, f"{name}{_ERROR}": error}
  return result


def _by_runs(
  evaluated: evaluated_lib.EvaluatedModel, batch: Batch, num_loops: int
) -> Scores:
  """Scores of runs with 1, 2, 4, ... loops, as trained, evaluated, and most."""
  settings = evaluated.settings
  powers = [2**n for n in range(num_loops.bit_length())]
  trained = settings.model.num_loops
  counts = sorted({*powers, trained, settings.eval_loops, num_loops})
  runs = [_run(evaluated, batch, loops, every=False) for loops in counts]
  last_loop = np.subtract(counts, 1)

  def placed(*rows: np.ndarray) -> np.ndarray:
    padded = np.full((num_loops, rows[0].shape[1]), np.nan)
    padded[last_loop] = np.concatenate(rows)
    return padded

  return jax.tree.map(placed, *runs)


def _run(
  evaluated: evaluated_lib.EvaluatedModel,
  batch: Batch,
  num_loops: int,
  *,
  every: bool,
) -> Scores:
  """Scores of one run, after every loop or only after its last."""
  settings = evaluated.settings
  run = jax.jit(
    functools.partial(
      _of_rows,
      graphdef=evaluated.graphdef,
      score=settings.task_module.score,
      num_loops=num_loops,
      every=every,
    )
  )
  size = min(settings.eval.batch_size, len(batch["inputs"]))
  return evaluated_lib.in_batches(
    functools.partial(run, evaluated.params), batch, size, axis=1
  )


def _of_rows(
  params: Any,
  batch: Mapping[str, Array],
  *,
  graphdef: nnx.GraphDef,
  score: Callable[[Output, Batch], dict[str, Any]],
  num_loops: int,
  every: bool,
) -> Scores:
  """`scores_by_loop` of rows, and the state's."""
  model: Any = nnx.merge(graphdef, params)
  inputs = step.model_inputs(batch)
  state: Scores = {}
  if every:
    trace = model(**inputs, num_loops=num_loops, targets=batch["targets"]).trace
    losses, prediction = trace["loss"], trace["prediction"]
    ones = jnp.ones(losses.shape[:2])
    state = {name: (trace[name], ones) for name in every_loop.STATE}
  else:
    output = model(**inputs, num_loops=num_loops)
    tokens = token_losses.read_out(model, output.hidden, batch["targets"])
    losses, prediction = (x[None] for x in tokens)
  vocab_size = model.spec.vocab_size
  return {
    **scores_by_loop(score, prediction, batch, vocab_size, losses),
    **state,
  }


_OTHER_COLORS = tuple(c for c in draw.PALETTE if c not in draw.SCORE_COLORS)
# Panels besides the scores: name, title, unit.
_PANELS = (
  ("bits_per_byte", "Bits per byte", "bits per byte"),
  ("loss", "Loss", "nats"),
  ("hidden_norm", "Norm of the state", "norm"),
  ("relative_change", "Change of the state by a loop", "of its norm"),
  ("token_correlation", "Cosine between tokens and their mean", "cosine"),
)
_WIDE = 10.0  # States with at least this range have a logarithmic scale.


def draw_depth(
  scores: Mapping[str, np.ndarray],
  headline: Sequence[str],
  num_loops: int,
  num_examples: int,
  directory: pathlib.Path,
) -> list[pathlib.Path]:
  """depth.png: scores and states after each loop (UTM, figure 7).

  With many splits, draws the held-out ones; splits that differ only in their
  number share a panel.

  Args:
    scores: from `scores_by_depth`; scalars are not drawn.
    headline: the task's scores, in their colours of curves.png.
    num_loops: K, the trained depth.
    num_examples: number of examples behind the scores.
  """
  vectors = {name: x for name, x in scores.items() if np.ndim(x)}
  of_metric: list[tuple[str, str, list[str]]] = []
  for name, title, unit in _PANELS:
    if names_of_metric := [x for x in vectors if x.rpartition("/")[2] == name]:
      of_metric.append((title, unit, names_of_metric))
  drawn = {name for *_, names in of_metric for name in names}
  shares = [x for x in vectors if x not in drawn and not x.endswith(_ERROR)]
  if shares:
    title = "Accuracy after each loop"
    shares.sort(key=lambda name: np.nanmax(vectors[name]))
    of_metric.insert(0, (title, "share", shares))
  panels: list[tuple[str, str, Sequence[str]]] = [
    (f"{title}{of_part}", unit, names)
    for title, unit, names_of_metric in of_metric
    for of_part, names in _parts(names_of_metric).items()
  ]
  across = min(len(panels), 2)
  size = (8.5, 4.4) if across == 1 else (5.5, 3.9)
  figure, grid = draw.grid(len(panels), across, *size)
  colors = dict(zip(headline, itertools.cycle(draw.SCORE_COLORS)))
  for axes, (title, unit, names) in zip(grid, panels, strict=True):
    for index, name in enumerate(names):
      other = _OTHER_COLORS[index % len(_OTHER_COLORS)]
      _draw_line(axes, vectors, name, num_loops, colors.get(name, other))
    if unit in ("norm", "of its norm"):
      values = np.concatenate([vectors[name] for name in names])
      if np.nanmax(values) > _WIDE * np.nanmin(values) > 0:
        axes.set_yscale("log")
    if unit == "share":
      axes.set_ylim(-0.02, 1.08)
    _mark_trained(axes, num_loops)
    draw.tidy(axes, title, "loops run", unit)
    axes.legend(fontsize=9, edgecolor="none", framealpha=0.7)
  figure.suptitle(f"{num_examples:,} examples, ±1 standard error", fontsize=9)
  return [draw.save(figure, directory / "depth.png")]


def _parts(names: Sequence[str]) -> Mapping[str, Sequence[str]]:
  """Lines of one unit, "<score>" or "<split>/<score>", by suffix of a title."""
  if len(names) <= draw.MOST_LINES:
    return {"": names}
  held_out = [name for name in names if name.startswith("test_")] or names
  parts: dict[str, list[str]] = {}
  for name in sorted(held_out):
    split = name.rpartition("/")[0]
    stem = re.sub(r"_?\d+$", "", split).replace("_", " ")
    parts.setdefault(f", {stem}" if stem else "", []).append(name)
  return parts


def _draw_line(
  axes: axes_lib.Axes,
  vectors: Mapping[str, np.ndarray],
  name: str,
  num_loops: int,
  color: str,
) -> None:
  """A score with its error, its value at the trained depth and its best."""
  ran = np.flatnonzero(np.isfinite(vectors[name]))
  mean, error = (vectors[x][ran] for x in (name, name + _ERROR))
  best_of = np.argmin if series.lower_is_better(name) else np.argmax
  best = int(best_of(mean))
  words, loops = name.replace("_", " "), ran + 1
  label = f"{words}: {vectors[name][num_loops - 1]:.3f} after {num_loops}"
  if _is_score(name):
    label += f", best {mean[best]:.3f} after {loops[best]}"
    axes.plot(loops[best], mean[best], "o", color=color, ms=5)
  marker = None if len(ran) == len(vectors[name]) else "."
  axes.plot(loops, mean, color=color, label=label, marker=marker)
  axes.fill_between(
    loops, mean - error, mean + error, color=color, alpha=0.25, linewidth=0
  )


def _is_score(name: str) -> bool:
  """Whether the quantity has a best value."""
  states = {name for name, *_ in _PANELS[2:]}
  return name.rpartition("/")[2] not in states


def _mark_trained(axes: axes_lib.Axes, num_loops: int) -> None:
  """A vertical line at the trained depth."""
  axes.axvline(num_loops, color=draw.GREY, linestyle=":")
  axes.annotate(
    " trained depth",
    (num_loops, 1.0),
    xycoords=("data", "axes fraction"),
    va="top",
    color=draw.GREY,
    fontsize=9,
  )
  axes.set_xlim(left=0)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
