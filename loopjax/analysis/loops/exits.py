"""Early exits of a looped model, compared with a fixed number of loops.

Ouro (arXiv 2510.25741, sections 3.2 and 5): how much each loop improves a
token's loss, whether the gate predicts this, and the effect of loops beyond the
trained number.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib import ticker

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw
from loopjax.commands import document
from loopjax.data.text import task as text_task
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.loop import exits
from loopjax.losses import tokens as token_losses
from loopjax.models import looped
from loopjax.program.eval_step import model_inputs
from loopjax.run import workdir as workdir_lib
from loopjax.types import PRECISIONS, Array

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
MAP_THRESHOLD = 0.5
_BEYOND = 2  # Runs this many times the trained number of loops.
_NUM_ROWS, _CHUNK, _NUM_DRAWN = 128, 16, 4


class ExitMeasurements(NamedTuple):
  """Losses, gate logits and changes of rows of text after every loop.

  Attributes:
    losses: cross-entropy of each token, f32 [K', B, T], nats; K' is twice the
      trained number of loops K.
    gates: logits of the gate, f32 [K, B, T].
    changes: f32 [K, B, T], see `loop.exits.relative_change`; for the first
      loop, the change from the embedding.
    weights: weights of the tokens, f32 [B, T].
  """

  losses: np.ndarray
  gates: np.ndarray
  changes: np.ndarray
  weights: np.ndarray


def draw_curve(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """exit_curve.png and .json: loss against the number of loops per token."""
  if not _has_gate(evaluated):
    return []
  found = measure(evaluated)
  trained = evaluated.settings.model.num_loops
  fixed, gate, change = (
    curve(found, trained, by) for by in ("fixed", "gate", "change")
  )
  figure = draw.new(7.5, 4.6)
  axes = figure.subplots()
  for rows, color, label in (
    (fixed, draw.GREY, "fixed number of loops"),
    (gate, draw.BLUE, "exit by gate"),
    (change, draw.ORANGE, "exit by change of the state"),
  ):
    loops, losses, errors = (
      [row[name] for row in rows] for name in ("loops", "loss", "error")
    )
    axes.errorbar(
      loops, losses, errors, color=color, marker="o", ms=4, capsize=2,
      label=label,
    )  # fmt: skip
  axes.axvline(trained, color=draw.GREY, linestyle=":")
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  draw.tidy(
    axes,
    f"Loss by number of loops, {found.losses.shape[1]} rows; trained with "
    f"{trained}",
    "loops per token",
    "nats per token, ±1 standard error of the difference",
  )
  axes.legend(frameon=False, fontsize=9)
  numbers = evaluated.directory / "exit_curve.json"
  content = {
    "rows": found.losses.shape[1],
    "trained_num_loops": trained,
    "earlier_tokens": "run all loops",
    "fixed": fixed,
    "gate": gate,
    "change": change,
  }
  workdir_lib.write_json(numbers, content)
  return [draw.save(figure, evaluated.directory / "exit_curve.png"), numbers]


def draw_map(evaluated: evaluated_lib.EvaluatedModel) -> list[pathlib.Path]:
  """exit_map.html: text, each token shaded by the loop at which it exits."""
  task = evaluated.settings.task
  if not _has_gate(evaluated) or not isinstance(task, text_task.Config):
    return []
  found = measure(evaluated, _NUM_DRAWN)
  trained = evaluated.settings.model.num_loops
  steps = exit_steps(found, trained, "gate", MAP_THRESHOLD)
  tokenizer = tokenizer_lib.of(task)
  blocks: list[document.Block] = [
    document.Heading(1, "When tokens exit"),
    document.Paragraph(
      f"Darker tokens ran more of the {trained} loops. A token exits once the "
      f"gate's cumulative exit probability is at least {MAP_THRESHOLD:g}. "
      "Earlier tokens run all loops. Hover over a token for its loss after "
      "each loop, in nats."
    ),
  ]
  for row in range(len(steps)):
    targets = evaluated.batch["targets"][row]
    known = np.flatnonzero(found.weights[row] > 0)
    pieces = [
      (
        text,
        (steps[row, place] - 1) / (trained - 1),
        note(found.losses[:trained, row, place], int(steps[row, place])),
      )
      for text, place in zip(
        token_texts(tokenizer, targets[known].tolist()), known, strict=True
      )
    ]
    mean = steps[row, known].mean() if len(known) else 0.0
    blocks += [
      document.Heading(2, f"Row {row + 1}: {mean:.2f} loops per token"),
      document.Shaded(pieces),
    ]
  path = evaluated.directory / "exit_map.html"
  path.write_text(document.to_html("When tokens exit", blocks))
  return [path]


def measure(
  evaluated: evaluated_lib.EvaluatedModel, num_rows: int = _NUM_ROWS
) -> ExitMeasurements:
  """Runs twice the trained number of loops, with the loss after each."""
  settings = evaluated.settings
  trained = settings.model.num_loops
  batch = {name: x[:num_rows] for name, x in evaluated.batch.items()}
  run = jax.jit(
    functools.partial(_of_rows, graphdef=evaluated.graphdef, num_loops=trained)
  )
  parts = []
  for start in range(0, len(batch["inputs"]), _CHUNK):
    chunk = {name: x[start : start + _CHUNK] for name, x in batch.items()}
    rows = {**model_inputs(chunk), "targets": chunk["targets"]}
    parts.append(jax.device_get(run(evaluated.params, rows)))
  losses, gates, changes = (
    np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)
  )
  return ExitMeasurements(losses, gates, changes, batch["weights"])


def _of_rows(
  params: Any, rows: dict[str, Array], *, graphdef: Any, num_loops: int
) -> tuple[Array, Array, Array]:
  """The losses, gates and changes of `ExitMeasurements`."""
  model: looped.Model = nnx.merge(graphdef, params)
  output = model(
    rows["inputs"],
    documents=rows.get("documents"),
    num_loops=_BEYOND * num_loops,
    trace=("hidden",),
  )
  hidden = output.trace["hidden"]
  losses = token_losses.next_token_by_loop(
    model.readout_input(hidden),
    model.readout_table(),
    rows,
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )
  first = model.embed(rows["inputs"], None)[None]
  hidden = hidden[:num_loops]
  before = jnp.concatenate([first.astype(hidden.dtype), hidden[:-1]])
  changes = exits.relative_change(before, hidden)
  return losses, model.exit_logits(hidden), changes


def exit_steps(
  found: ExitMeasurements, num_loops: int, rule: str, threshold: float
) -> np.ndarray:
  """The loop after which each token exits, int [B, T], from 1.

  Args:
    found: from `measure`.
    num_loops: K, the maximum number of loops.
    rule: "gate" or "change", see `loop.exits.ExitPolicy`.
    threshold: in (0, 1]; 1 for no exits.
  """
  if rule == "gate":
    gates = jnp.asarray(found.gates[:num_loops])
    return np.asarray(exits.first_exit(gates, threshold)) + 1
  leaves = (found.changes[:num_loops] <= 1 - threshold) & (threshold < 1)
  leaves[-1] = True
  return np.argmax(leaves, axis=0) + 1


def curve(
  found: ExitMeasurements, trained: int, by: str
) -> list[dict[str, float]]:
  """Loss and loops per token, weighted by token.

  Args:
    found: from `measure`.
    trained: number of loops in training, the maximum with exits.
    by: "fixed" for a row per number of loops; or a rule of `exit_steps` for a
      row per threshold.

  Returns:
    Rows of "loops" and "loss" per token; "error", the standard error over rows
    of text of the loss minus the loss with all trained loops; and, for exits,
    "threshold".
  """
  weights = found.weights.astype(np.float64)
  weights /= max(weights.sum(), 1e-9)
  full = found.losses[trained - 1]

  def row(steps: np.ndarray, **more: float) -> dict[str, float]:
    losses = np.take_along_axis(found.losses, steps[None] - 1, axis=0)[0]
    change = losses - full
    mean = np.sum(weights * change)
    off = np.sum(weights * (change - mean), axis=1)  # Rows are independent.
    return {
      **more,
      "loops": float(np.sum(weights * steps)),
      "loss": float(np.sum(weights * losses)),
      "error": float(np.sqrt(np.sum(off**2))),
    }

  if by == "fixed":
    counts = range(1, len(found.losses) + 1)
    return [row(np.full(full.shape, count)) for count in counts]
  return [
    row(exit_steps(found, trained, by, threshold), threshold=threshold)
    for threshold in THRESHOLDS
  ]


def note(losses: np.ndarray, step: int) -> str:
  """A token's tooltip: its exit loop, and its loss after each loop."""
  by_loop = ", ".join(f"{loss:.2f}" for loss in losses)
  return f"exits after loop {step}; loss per loop: {by_loop}"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """The text of each token; a split character belongs to its last token."""
  texts: list[str] = []
  waiting: list[int] = []
  for token in ids:
    if token == tokenizer.end:
      texts.append("\n¶\n")
      waiting = []
      continue
    waiting.append(token)
    text = tokenizer.decode(waiting)
    whole = not text.endswith("\ufffd") or len(waiting) == 4
    texts.append(text if whole else "")
    waiting = [] if whole else waiting
  if waiting:  # An incomplete character.
    texts[-1] = tokenizer.decode(waiting)
  return texts


def _has_gate(evaluated: evaluated_lib.EvaluatedModel) -> bool:
  """Whether the model has a trained gate."""
  model = evaluated.settings.model
  return isinstance(model, looped.Config) and model.exit_gate in (
    "joint",
    "alone",
  )
