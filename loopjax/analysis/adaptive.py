"""Figures of looped layers and their memory reads.

These are figures 2 to 4 of "Adaptive Loops and Memory" (arXiv 2603.08391), and
two of our own: the use of slots, and the savings of halting at inference.
"""

import pathlib
from typing import Any

import matplotlib
import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import ticker

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import halting
from loopjax.analysis.plots import draw, series
from loopjax.run import statistics
from loopjax.run import workdir as workdir_lib
from loopjax.types import Output

_STEPS = "optimizer steps"
BANKS = ("local", "global")
EXIT_THRESHOLDS = (1.0, 0.99, 0.9, 0.7, 0.5)  # 1 disables exits.
_NUM_EXIT_EXAMPLES = 64
_MAX_NAMED = 6  # Up to this many layers, each has a legend entry.


def draw_loops(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """loops.png: E[n] of every layer, over training and by loss; loop scales."""
  num_loops = evaluated.settings.model.num_loops
  steps, expected = series.by_layer(evaluated.rows, "train", "ponder_steps")
  if not len(steps) or num_loops == 1:
    return []
  figure = draw.new(11, 7.2)
  (over, at_end), (onset, scales) = figure.subplots(2, 2)
  _lines_by_layer(over, steps, expected)
  title = "Expected iterations per layer, E[n]"
  draw.tidy(over, title, _STEPS, "iterations")

  _, spread = series.by_layer(evaluated.rows, "train", "ponder_steps_std")
  layers = np.arange(1, expected.shape[1] + 1)
  colors = _colors(len(layers))
  at_end.bar(layers, expected[-1] - 1, bottom=1, color=colors)
  within = np.clip(expected[-1] + spread[-1] * [[-1], [1]], 1, num_loops)
  at_end.vlines(layers, *within, color=draw.GREY)
  title = f"At step {steps[-1]}, ±1 standard deviation over tokens"
  draw.tidy(at_end, title, "layer", "E[n], iterations")

  by_loss, loss = series.together(
    series.by_layer(evaluated.rows, "validation", "ponder_steps"),
    series.scalar(evaluated.rows, "validation", "loss"),
  )
  if len(loss):  # The run may have no evaluation yet.
    for line, color in zip(by_loss.T, colors, strict=True):
      onset.plot(loss, line, color=color, alpha=0.6, linewidth=1)
    onset.plot(
      loss, by_loss.mean(axis=1), color=draw.ORANGE, marker="o", ms=4,
      label="mean of layers",
    )  # fmt: skip
    onset.legend(frameon=False, fontsize=9)
  onset.invert_xaxis()
  title = "When layers start to loop"
  draw.tidy(onset, title, "validation loss, nats", "E[n], iterations")
  for axes in (over, at_end, onset):
    low, high = axes.get_ylim()
    axes.set_ylim(max(min(low, 1.0), 0), min(high, num_loops + 0.05))

  for t in range(num_loops):
    values = [
      series.by_loop(evaluated.rows, "train", f"loop_scale/layer={i}")[1][-1, t]
      for i in range(len(layers))
    ]
    scales.plot(
      layers, values, color=draw.color(t), marker="o", ms=4,
      label=f"iteration {t + 1}",
    )  # fmt: skip
  scales.set_yscale("log")
  scales.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
  scales.yaxis.set_minor_formatter(ticker.NullFormatter())
  low, high = np.log10(scales.get_ylim())
  scales.set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
  title = f"Loop scales at step {steps[-1]}"
  draw.tidy(scales, title, "layer", r"softplus($\alpha_t$)")
  scales.legend(frameon=False, fontsize=9)
  for axes in (at_end, scales):
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  return [draw.save(figure, evaluated.directory / "loops.png")]


def draw_memory(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """memory.png: gates over training, and attention to slots, for every bank."""
  banks = [
    bank
    for bank in BANKS
    if len(series.by_layer(evaluated.rows, "train", f"{bank}_gate")[0])
  ]
  if not banks:
    return []
  traces = tuple(f"{bank}_slots" for bank in banks)
  num = evaluated_lib.max_examples(evaluated.spec)
  output = evaluated.forward(traces, averaged=traces, num_examples=num)
  figure = draw.new(11, 3.6 * len(banks))
  grid = figure.subplots(len(banks), 2, squeeze=False)
  for bank, (gates, slots) in zip(banks, grid, strict=True):
    steps, values = series.by_layer(evaluated.rows, "train", f"{bank}_gate")
    _lines_by_layer(gates, steps, values)
    gates.set_ylim(0, 1)
    title = f"{bank.capitalize()} memory: mean gate per layer"
    draw.tidy(gates, title, _STEPS, "gate")
    attention = output.trace[f"{bank}_slots"].mean(axis=0)  # [L, M]
    num_layers, num_slots = attention.shape
    entropy = [
      output.stats[f"{bank}_entropy/layer={i}"].mean()
      for i in range(num_layers)
    ]
    layers = np.arange(1, num_layers + 1)
    for shift, numbers, color, label in (
      (-0.2, slots_in_use(attention), draw.BLUE, "by all tokens together"),
      (0.2, np.exp(entropy), draw.ORANGE, "by one token"),
    ):
      slots.bar(layers + shift, numbers, 0.4, color=color, label=label)
    slots.axhline(
      num_slots, color=draw.GREY, linestyle=":", label=f"all {num_slots}"
    )
    slots.set_ylim(0, 1.2 * num_slots)
    slots.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    title = (
      f"{bank.capitalize()} memory: effective number of slots read, "
      "exp(entropy)"
    )
    draw.tidy(slots, title, "layer", "slots")
    slots.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
  return [draw.save(figure, evaluated.directory / "memory.png")]


def slots_in_use(attention: np.ndarray) -> np.ndarray:
  """Effective number of slots, exp(entropy) of attention [..., M]: 1 to M."""
  logs = np.log(np.where(attention > 0, attention, 1.0))
  return np.exp(-np.sum(attention * logs, axis=-1))


def draw_exits(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """exits.png and .json: iterations and score when tokens halt at inference."""
  if not evaluated.settings.family.halting_trace:
    return []
  settings = evaluated.settings
  num_loops, score = settings.eval_loops, settings.task_module.HEADLINE[0]
  if num_loops == 1:
    return []
  measured = exits(evaluated, score)
  figure = draw.new(7.5, 4.4)
  axes = figure.subplots()
  changes = [row[f"{score}/change"] for row in measured]
  errors = np.array(
    [row.get(f"{score}/change_error") for row in measured], float
  )
  for name, color, label in (
    ("loops_per_token", draw.BLUE, "in a token's output (all iterations run)"),
    (
      "loops_per_row",
      draw.ORANGE,
      "run, if a layer stops once its whole row has halted",
    ),
  ):
    loops = [row[name] for row in measured]
    axes.errorbar(
      loops, changes, errors, color=color, marker="o", ms=4, capsize=2,
      label=label,
    )  # fmt: skip
  for row, change in zip(measured, changes, strict=True):
    axes.annotate(
      f"{row['exit_threshold']:g}", (row["loops_per_token"], change),
      textcoords="offset points", xytext=(4, 6), fontsize=8, color=draw.BLUE,
    )  # fmt: skip
  axes.axhline(0, color=draw.GREY, linestyle=":")
  words = score.replace("_", " ")
  draw.tidy(
    axes,
    f"Halting at inference by threshold; {words} without it"
    f" {measured[0][score]:.3f}, {measured[0]['rows']} rows",
    f"iterations out of {num_loops}, mean over layers",
    f"change in {words}, ±1 standard error",
  )
  axes.legend(frameon=False, fontsize=9)
  numbers = evaluated.directory / "exits.json"
  workdir_lib.write_json(numbers, {"exits": measured})
  return [draw.save(figure, evaluated.directory / "exits.png"), numbers]


def exits(
  evaluated: evaluated_lib.EvaluatedModel, score: str
) -> list[dict[str, Any]]:
  """A score, and the iterations that it takes, at each of `EXIT_THRESHOLDS`.

  A halted token still passes through the remaining iterations, because later
  tokens attend to its keys and values there: halting saves compute only once
  all tokens of a batch have halted.

  Returns:
    For each threshold: "exit_threshold"; "rows"; "loops_per_token", mean over
    layers and real tokens of the iterations that count in a token's output;
    "loops_per_row", mean over layers and rows of the iteration at which the
    last token of a row stops; the score; "<score>/change", its difference from
    the score without exits on the same rows; and the standard error of the
    difference, "<score>/change_error".
  """
  num = min(_NUM_EXIT_EXAMPLES, evaluated_lib.max_examples(evaluated.spec))
  batch = {name: value[:num] for name, value in evaluated.batch.items()}
  real = batch["inputs"] < evaluated.spec.num_tokens
  if "documents" in batch:  # The end token may also be the padding.
    real &= batch["documents"] > 0
  rows: list[dict[str, Any]] = []
  without = None
  trace = evaluated.settings.family.halting_trace
  assert trace is not None, evaluated.settings.model_name
  for threshold in EXIT_THRESHOLDS:
    output = evaluated.forward(
      (trace,), num_examples=num, exit_threshold=threshold
    )
    steps = halting.steps_taken(output.trace[trace])  # [B, T, L]
    values, weights = _scored(evaluated, output, batch, score)
    without = values if without is None else without
    mean, _ = statistics.mean(weights * values, weights)
    change, error = statistics.mean(weights * (values - without), weights)
    rows.append({
      "exit_threshold": threshold,
      "rows": len(steps),
      "loops_per_token": float(steps[real].mean()),
      "loops_per_row": float(
        np.where(real[..., None], steps, 0).max(axis=1).mean()
      ),
      score: float(mean),
      f"{score}/change": float(change),
      **workdir_lib.finite({f"{score}/change_error": float(error)}),
    })  # fmt: skip
  return rows


def _scored(
  evaluated: evaluated_lib.EvaluatedModel,
  output: Output,
  batch: Any,
  score: str,
) -> tuple[np.ndarray, np.ndarray]:
  """The score of every row, and its weight, f64 [B] each."""
  value = evaluated.settings.task_module.score(output, batch)[score]
  if not isinstance(value, tuple):
    value = value, np.ones(len(batch["inputs"]))
  values, weights = (np.asarray(part, np.float64) for part in value)
  return values, weights


def _colors(num_layers: int) -> np.ndarray:
  """Colours of layers from light to dark, as in the paper."""
  return matplotlib.colormaps["Blues"](np.linspace(0.35, 1.0, num_layers))


def _lines_by_layer(
  axes: axes_lib.Axes, steps: np.ndarray, values: np.ndarray
) -> None:
  """A line for each column of values [N, L]."""
  num_layers = values.shape[1]
  spread = np.linspace(0, num_layers - 1, min(num_layers, _MAX_NAMED))
  named = set(np.rint(spread).astype(int).tolist())
  for i, color in enumerate(_colors(num_layers)):
    label = f"layer {i + 1}" if i in named else None
    axes.plot(steps, values[:, i], color=color, label=label)
  axes.legend(frameon=False, fontsize=8)
