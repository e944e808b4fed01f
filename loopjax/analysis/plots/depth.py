"""Plots of scores and states against the number of loops."""

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import ticker

from loopjax.analysis.plots import draw, series

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
_ERROR = "/standard_error"


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
    scores: from `depth.scores_by_depth`; scalars are not drawn.
    headline: the task's scores, in their colours of curves.png.
    num_loops: K, the trained depth.
    num_examples: number of examples behind the scores.
    directory: where to write.
  """
  vectors = {name: x for name, x in scores.items() if np.ndim(x)}
  of_metric: list[tuple[str, str, list[str]]] = []
  for name, title, unit in _PANELS:
    if found := [x for x in vectors if x.rpartition("/")[2] == name]:
      of_metric.append((title, unit, found))
  drawn = {name for *_, names in of_metric for name in names}
  shares = [x for x in vectors if x not in drawn and not x.endswith(_ERROR)]
  if shares:
    title = "Accuracy after each loop"
    shares.sort(key=lambda name: np.nanmax(vectors[name]))
    of_metric.insert(0, (title, "share", shares))
  panels: list[tuple[str, str, Sequence[str]]] = [
    (f"{title}{of_part}", unit, names)
    for title, unit, found in of_metric
    for of_part, names in _parts(found).items()
  ]
  num_rows, across = (len(panels) + 1) // 2, min(len(panels), 2)
  size = (8.5, 4.4) if across == 1 else (11, 3.9 * num_rows)
  figure = draw.new(*size)
  grid = figure.subplots(num_rows, across, squeeze=False).ravel()
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  colors = dict(zip(headline, itertools.cycle(draw.SCORE_COLORS)))
  for axes, (title, unit, names) in zip(grid, panels, strict=False):
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
  """The lines of each panel, by the suffix of its title.

  Args:
    names: "<score>" or "<split>/<score>", all of one unit.
  """
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
