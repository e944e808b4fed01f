"""Figures of fast weights after each pass over a window."""

import pathlib
import re

import numpy as np
from matplotlib import axes as axes_lib

from loopjax.analysis.plots import draw, series

_LAYER = re.compile(r"retention/memory=(\d+)/loop=0")


def draw_passes(
  rows: series.Rows, directory: pathlib.Path
) -> list[pathlib.Path]:
  """passes.png: norms after every pass, and the retained fraction of the state.

  Draws nothing for models without fast weights.

  Args:
    rows: rows of metrics.jsonl.
    directory: output directory.
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
    color = draw.PALETTE[n % len(draw.PALETTE)]
    axes.plot(steps, line, color=color, label=f"pass {n + 1}")
  axes.set_ylim(bottom=0)
  draw.tidy(axes, title, "optimizer steps", "norm")
  axes.legend(frameon=False, fontsize=9)


def _retention(axes: axes_lib.Axes, rows: series.Rows) -> None:
  """Plots the retained fraction, mean over passes, by memory layer."""
  found = {m[1] for row in rows for key in row if (m := _LAYER.fullmatch(key))}
  for layer in sorted(map(int, found)):
    name = f"retention/memory={layer}"
    steps, values = series.by_loop(rows, "train", name)
    color = draw.PALETTE[layer % len(draw.PALETTE)]
    label = f"memory layer {layer + 1}"
    axes.plot(steps, values.mean(axis=1), color=color, label=label)
  axes.set_ylim(-0.02, 1.02)
  title = "Share of fast weights retained by one pass"
  draw.tidy(axes, title, "optimizer steps", "share, mean over heads")
  axes.legend(frameon=False, fontsize=9)
