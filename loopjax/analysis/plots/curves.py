"""Plots of numbers over training steps and over loops."""

import itertools
import pathlib
import re
from collections.abc import Sequence

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import ticker

from loopjax.analysis import halting
from loopjax.analysis.evaluated import EvaluatedModel
from loopjax.analysis.plots import draw, series

_STEPS = "optimizer steps"
_COLUMN = 14  # Names per legend column of a panel's height.
_LAYER = re.compile(r"retention/memory=(\d+)/loop=0")
_GROUP_LOSS = re.compile(r"loss/([^=/]+)=[^/]*")

# Panels of curves.png: title, unit, scale ("wide": logarithmic if the values
# span a decade) and (split, metric, label, colour).
_PANELS = (
  (
    "Loss",
    "nats per token",
    "wide",
    (
      ("train", "loss", "training, including penalties", draw.BLUE),
      ("validation", "loss", "validation", draw.ORANGE),
    ),
  ),
  (
    "Loops until a token halts",
    "loops",
    "linear",
    (
      ("train", "ponder_steps", "all tokens", draw.BLUE),
      ("train", "ponder_steps_cells", "cells", draw.GREEN),
      ("train", "ponder_steps_memory", "memory tokens", draw.ORANGE),
    ),
  ),
  (
    "Attention on memory, mean over heads and steps",
    "share",
    "linear",
    (
      ("validation", "attention_sequence_to_memory", "of cells", draw.GREEN),
      ("validation", "attention_memory_to_memory", "of memory", draw.ORANGE),
    ),
  ),
  (
    "Gradient norm, before clipping",
    "norm",
    "log",
    (
      ("train", "grad_norm", "all parameters", draw.GREY),
      ("train", "grad_norm/router", "router", draw.RED),
    ),
  ),
)


def draw_training(
  rows: series.Rows,
  headline: Sequence[str],
  num_loops: int,
  directory: pathlib.Path,
) -> list[pathlib.Path]:
  """curves.png: loss, scores, halting and gradients over training.

  Args:
    rows: rows of metrics.jsonl; panels without data are omitted.
    headline: the task's scores; the first is also drawn by split.
    num_loops: K, drawn as the ceiling of the ponder steps.
  """
  panels = [
    panel
    for panel in (
      _PANELS[0],
      _scores(headline),
      *_PANELS[1:],
      _by_split(rows, headline[0]),
      *_by_group(rows),
    )
    if any(
      len(series.scalar(rows, split, name)[0]) for split, name, *_ in panel[3]
    )
  ]
  if not panels:
    return []
  figure, grid = draw.grid(len(panels), 2, 5.5, 3.6)
  for axes, (title, unit, scale, lines) in zip(grid, panels, strict=True):
    for line in lines:
      _draw_line(axes, rows, *line)
    if unit == "loops":
      axes.axhline(num_loops, color=draw.GREY, linestyle=":", label="trained K")
    if unit == "score":
      axes.set_ylim(-0.02, max(1.02, axes.get_ylim()[1]))
    if scale == "log" or scale == "wide" and _spans_a_decade(axes):
      axes.set_yscale("log")
      for set_formatter in (
        axes.yaxis.set_major_formatter,
        axes.yaxis.set_minor_formatter,
      ):
        set_formatter(ticker.StrMethodFormatter("{x:g}"))
      axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.set_xlim(left=0)  # All panels begin at step 0.
    draw.tidy(axes, title, _STEPS, unit)
    columns = 1 + (len(axes.get_lines()) - 1) // _COLUMN
    many = len(axes.get_lines()) > draw.MOST_LINES
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if many else {}
    axes.legend(frameon=False, fontsize=9, ncols=columns, **beside)
  return [draw.save(figure, directory / "curves.png")]


def _scores(headline: Sequence[str]):
  """A panel with the task's scores besides the loss, which has its own."""
  lines = tuple(
    ("validation", name, _words(name), color)
    for name, color in zip(headline, itertools.cycle(draw.SCORE_COLORS))
    if name != "loss"
  )
  return "Scores of the validation split", *_unit(headline[0]), lines


def _unit(score: str) -> tuple[str, str]:
  """Unit and scale of a score."""
  is_bits = score == "bits_per_byte"
  return ("bits per byte", "wide") if is_bits else ("score", "linear")


def _words(name: str) -> str:
  return name.replace("_", " ")


def _by_split(rows: series.Rows, score: str):
  """A panel with a score, one line for every evaluation split that has it."""
  found = {row["split"]: None for row in rows if score in row}  # Keeps order.
  splits = [x for x in found if x not in ("train", "validation", "test")]
  # Validation and test versions of a held-out split share one colour.
  kinds = [split.removeprefix("validation_") for split in splits]
  kinds = [kind.removeprefix("test_") for kind in kinds]
  colors = dict(zip(dict.fromkeys(kinds), itertools.cycle(draw.PALETTE)))
  lines = [
    (split, score, _words(split), colors[kind])
    for split, kind in zip(splits, kinds, strict=True)
  ]
  title = f"{_words(score).capitalize()} by split"
  return title, *_unit(score), tuple(lines)


def _by_group(rows: series.Rows):
  """A panel for each grouping of validation that has several groups: losses."""
  groups: dict[str, dict[str, None]] = {}
  for key in (
    key for row in rows if row["split"] == "validation" for key in row
  ):
    if match := _GROUP_LOSS.fullmatch(key):
      groups.setdefault(match[1], {})[key] = None
  return [
    (
      f"Loss by {name} (number of examples)",
      "nats per token",
      "wide",
      tuple(
        ("validation", key, _with_count(rows, key), color)
        for key, color in zip(keys, itertools.cycle(draw.PALETTE))
      ),
    )
    for name, keys in groups.items()
    if len(keys) > 1
  ]


def _spans_a_decade(axes: axes_lib.Axes) -> bool:
  values = np.concatenate([np.ravel(x.get_ydata()) for x in axes.get_lines()])
  return bool(np.nanmax(values) > 10 * np.nanmin(values) > 0)


def _with_count(rows: series.Rows, key: str) -> str:
  """The group of "loss/rating=0", and its number of examples."""
  group = key.partition("=")[2]
  _, counts = series.scalar(rows, "validation", key.replace("loss", "count", 1))
  return f"{group} ({counts[-1]:,.0f})" if len(counts) else group


def _draw_line(
  axes: axes_lib.Axes, rows: series.Rows, split, name, label, color
):
  steps, values = series.scalar(rows, split, name)
  if not len(steps):
    return
  marker = (
    None if split == "train" else "*" if split.startswith("test") else "o"
  )
  axes.plot(steps, values, label=label, color=color, marker=marker, ms=5)
  at, errors = series.scalar(rows, split, f"{name}/standard_error")
  if split != "train" and np.array_equal(at, steps):
    low, high = values - errors, values + errors
    axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)


def _edges(centers: np.ndarray) -> np.ndarray:
  """Edges between centers; also for a single center."""
  centers = np.asarray(centers, float)
  gap = centers[1] - centers[0] if len(centers) > 1 else 1.0
  middles = (centers[1:] + centers[:-1]) / 2
  last = centers[-1] + (centers[-1] - middles[-1] if len(middles) else gap / 2)
  return np.concatenate([[centers[0] - gap / 2], middles, [last]])


def draw_router(evaluated: EvaluatedModel) -> list[pathlib.Path]:
  """router.png: halting probability per loop, over training and at the end."""
  rows = evaluated.rows
  steps, probability = series.by_loop(rows, "train", "router_probability")
  if not len(steps) or halting.ponder_steps(evaluated) is None:
    return []
  _, spread = series.by_loop(rows, "train", "router_probability_std")
  _, weight = series.by_loop(rows, "train", "output_weight")
  loops = np.arange(1, probability.shape[1] + 1)
  figure = draw.new(11, 4.2)
  left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
  mesh = left.pcolormesh(
    _edges(steps), _edges(loops), probability.T, cmap="viridis", vmin=0
  )
  figure.colorbar(mesh, ax=left, label="mean halting probability")
  draw.tidy(left, "Router over training", _STEPS, "loop")
  left.grid(False)
  label = "weight in the output"
  right.bar(loops, weight[-1], color=draw.ORANGE, alpha=0.6, label=label)
  mean, std = probability[-1], spread[-1]
  right.plot(
    loops, mean, color=draw.BLUE, marker="o", ms=4, label="halting probability"
  )
  right.fill_between(
    loops,
    np.clip(mean - std, 0, 1),
    np.clip(mean + std, 0, 1),
    color=draw.BLUE,
    alpha=0.15,
    linewidth=0,
    label="spread over tokens (1 std)",
  )
  right.set_ylim(0, 1)
  draw.tidy(right, f"At step {steps[-1]}, mean over tokens", "loop", "share")
  for axis in (left.yaxis, right.xaxis):
    axis.set_major_locator(ticker.MaxNLocator(integer=True))
  right.legend(frameon=False, fontsize=9)
  return [draw.save(figure, evaluated.directory / "router.png")]


def draw_halting(evaluated: EvaluatedModel) -> list[pathlib.Path]:
  """halting.png: how many tokens took how many steps."""
  steps = halting.ponder_steps(evaluated)
  if steps is None:
    return []
  num_loops = evaluated.settings.eval_loops
  parts = halting.by_kind(steps, evaluated.num_memory)
  figure = draw.new(8, 4)
  axes = figure.subplots()
  colors = {"cells": draw.GREEN, "memory": draw.ORANGE}
  width = 0.8 / len(parts)
  for index, (name, part) in enumerate(parts.items()):
    share = halting.histogram(part, num_loops)
    label = f"{name}, mean {part.mean():.1f}"
    shift = (index - (len(parts) - 1) / 2) * width
    where = np.arange(1, num_loops + 1) + shift
    axes.bar(where, share, width, color=colors[name], label=label)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  draw.tidy(axes, "Loops until a token halts", "loops", "share of tokens")
  axes.legend(frameon=False, fontsize=9)
  return [draw.save(figure, evaluated.directory / "halting.png")]


def draw_passes(
  rows: series.Rows, directory: pathlib.Path
) -> list[pathlib.Path]:
  """passes.png: norms after every pass, and the retained fraction of the state.

  Draws nothing for models without fast weights.
  """
  steps, fast = series.by_loop(rows, "train", "fast_weight_norm")
  if not len(steps):
    return []
  _, hidden = series.by_loop(rows, "train", "hidden_norm")
  figure = draw.new(13, 3.6)
  left, middle, right = figure.subplots(1, 3)
  _by_pass(left, "Fast weights, norm per head", steps, fast)
  _by_pass(middle, "Residual stream, norm per token", steps, hidden)
  _retention(right, rows)
  return [draw.save(figure, directory / "passes.png")]


def _by_pass(
  axes: axes_lib.Axes, title: str, steps: np.ndarray, values: np.ndarray
) -> None:
  for n, line in enumerate(values.T):
    axes.plot(steps, line, color=draw.color(n), label=f"pass {n + 1}")
  axes.set_ylim(bottom=0)
  draw.tidy(axes, title, _STEPS, "norm")
  axes.legend(frameon=False, fontsize=9)


def _retention(axes: axes_lib.Axes, rows: series.Rows) -> None:
  """Plots the retained fraction, mean over passes, by memory layer."""
  layers = {m[1] for row in rows for key in row if (m := _LAYER.fullmatch(key))}
  for layer in sorted(map(int, layers)):
    name = f"retention/memory={layer}"
    steps, values = series.by_loop(rows, "train", name)
    label = f"memory layer {layer + 1}"
    mean = values.mean(axis=1)
    axes.plot(steps, mean, color=draw.color(layer), label=label)
  axes.set_ylim(-0.02, 1.02)
  title = "Share of fast weights retained by one pass"
  draw.tidy(axes, title, _STEPS, "share, mean over heads")
  axes.legend(frameon=False, fontsize=9)
