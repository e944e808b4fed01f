"""Early exits of looped models and of MELT, against a fixed number of loops.

Looped models, as in Ouro (arXiv 2510.25741, sections 3.2 and 5): how much each
loop improves a token's loss, whether the gate predicts this, and the effect of
loops beyond the trained number. Earlier tokens run all loops.

When a token of MELT (arXiv 2605.07721) exits, later tokens attend to the latent
of its last loop: skipped loops are never run. Texts are therefore processed
token by token, as in generation, and the cost of an exit includes the effect on
later tokens. The paper does not study this (appendix F.2).
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib import ticker

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw
from loopjax.loop import exits
from loopjax.losses import tokens as token_losses
from loopjax.models import looped, melt
from loopjax.program.step import model_inputs
from loopjax.run import statistics
from loopjax.run import workdir as workdir_lib
from loopjax.types import Array

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_BEYOND = 2  # Runs this many times the trained number of loops.
_NUM_ROWS, _CHUNK = 128, 16

# Of MELT; with the last threshold there are no exits.
SKIPPING_THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
RULES = ("gate", "change")
MOST_LOST = 0.01  # Relative increase of the loss, in `skipping_scores`.
_NUM_SKIPPING_ROWS = 64


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
  measured = measure(evaluated)
  trained = evaluated.settings.model.num_loops
  most = evaluated.settings.eval_loops
  fixed, gate, change = (
    curve(measured, most, by) for by in ("fixed", "gate", "change")
  )
  return _draw(
    evaluated,
    "exit_curve",
    (
      (fixed, draw.GREY, "fixed number of loops"),
      (gate, draw.BLUE, "exit by gate"),
      (change, draw.ORANGE, "exit by change of the state"),
    ),
    f"Loss by number of loops, {measured.losses.shape[1]} rows; trained with "
    f"{trained}",
    {
      "rows": measured.losses.shape[1],
      "num_loops": most,
      "trained_num_loops": trained,
      "earlier_tokens": "run all loops",
      "fixed": fixed,
      "gate": gate,
      "change": change,
    },
    trained,
  )


def _draw(
  evaluated: evaluated_lib.EvaluatedModel,
  name: str,
  curves: Sequence[tuple[Sequence[Mapping[str, Any]], str, str]],
  title: str,
  content: Mapping[str, Any],
  trained: int | None = None,
) -> list[pathlib.Path]:
  """NAME.png and NAME.json: loss against loops per token.

  Args:
    curves: rows of "loops", "loss" and "error"; colour; label.
    content: what the JSON has.
    trained: the number of loops to mark.
  """
  figure = draw.new(7.5, 4.6)
  axes = figure.subplots()
  for rows, color, label in curves:
    loops, losses, errors = (
      [row[column] for row in rows] for column in ("loops", "loss", "error")
    )
    axes.errorbar(
      loops, losses, np.array(errors, float), color=color, marker="o", ms=4,
      capsize=2, label=label,
    )  # fmt: skip
  if trained is not None:
    axes.axvline(trained, color=draw.GREY, linestyle=":")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  error = "nats per token, ±1 standard error of the difference"
  draw.tidy(axes, title, "loops per token", error)
  axes.legend(frameon=False, fontsize=9)
  numbers = evaluated.directory / f"{name}.json"
  workdir_lib.write_json(numbers, content)
  return [draw.save(figure, evaluated.directory / f"{name}.png"), numbers]


def measure(
  evaluated: evaluated_lib.EvaluatedModel, num_rows: int = _NUM_ROWS
) -> ExitMeasurements:
  """Runs twice the evaluation's number of loops, with the loss after each."""
  most = evaluated.settings.eval_loops
  batch = {name: x[:num_rows] for name, x in evaluated.batch.items()}
  run = jax.jit(
    functools.partial(_of_rows, graphdef=evaluated.graphdef, num_loops=most)
  )
  losses, gates, changes = evaluated_lib.in_batches(
    functools.partial(run, evaluated.params),
    {**model_inputs(batch), "targets": batch["targets"]},
    min(_CHUNK, len(batch["inputs"])),
    axis=1,
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
    model, model.readout_input(hidden), rows["targets"]
  )
  first = model.embed(rows["inputs"], None)[None]
  hidden = hidden[:num_loops]
  before = jnp.concatenate([first.astype(hidden.dtype), hidden[:-1]])
  changes = exits.relative_change(before, hidden)
  return losses, model.exit_logits(hidden), changes


def exit_steps(
  measured: ExitMeasurements, num_loops: int, rule: str, threshold: float
) -> np.ndarray:
  """The loop after which each token exits, int [B, T], from 1.

  Args:
    measured: from `measure`.
    num_loops: K, the maximum number of loops.
    rule: "gate" or "change", see `loop.exits.ExitPolicy`.
    threshold: in (0, 1]; 1 for no exits.
  """
  if rule == "gate":
    gates = jnp.asarray(measured.gates[:num_loops])
    return np.asarray(exits.first_exit(gates, threshold)) + 1
  leaves = (measured.changes[:num_loops] <= 1 - threshold) & (threshold < 1)
  leaves[-1] = True
  return np.argmax(leaves, axis=0) + 1


def curve(
  measured: ExitMeasurements, num_loops: int, by: str
) -> list[dict[str, Any]]:
  """Loss and loops per token, weighted by token.

  Args:
    measured: from `measure`.
    num_loops: the maximum with exits.
    by: "fixed" for a row per number of loops; or a rule of `exit_steps` for a
      row per threshold.

  Returns:
    Rows of "loops" and "loss" per token; "error", the standard error over rows
    of text of the loss minus the loss with the maximum; and, for exits,
    "threshold".
  """
  full = measured.losses[num_loops - 1]

  def row(steps: np.ndarray, **more: Any) -> dict[str, Any]:
    losses = np.take_along_axis(measured.losses, steps[None] - 1, axis=0)[0]
    return {**more, **_means(losses, steps, measured.weights, full)}

  if by == "fixed":
    counts = range(1, len(measured.losses) + 1)
    return [row(np.full(full.shape, count)) for count in counts]
  return [
    row(exit_steps(measured, num_loops, by, threshold), threshold=threshold)
    for threshold in THRESHOLDS
  ]


def _means(
  losses: np.ndarray, loops: np.ndarray, weights: np.ndarray, full: np.ndarray
) -> dict[str, float | None]:
  """Loops and loss of a token, and the standard error of losses - full.

  All [B, T]; the error is None for a single row.
  """
  weights = weights.astype(np.float64)
  (mean_loops, _), (loss, _), (_, error) = (
    statistics.mean((weights * values).sum(axis=1), weights.sum(axis=1))
    for values in (loops, losses, losses - full)
  )
  return {
    "loops": float(mean_loops),
    "loss": float(loss),
    "error": None if np.isnan(error) else float(error),
  }


def _has_gate(evaluated: evaluated_lib.EvaluatedModel) -> bool:
  """Whether the model has a trained gate."""
  model, trained = evaluated.settings.model, ("joint", "alone")
  return isinstance(model, looped.Config) and model.exit_gate in trained


def measure_skipping(
  evaluated: evaluated_lib.EvaluatedModel,
) -> list[dict[str, Any]]:
  """Loops and loss of a token, for every rule and threshold.

  Only for models that kept the looped model's gate. Uses only the first
  document of each row.

  Returns:
    A row for each: "rule"; "threshold"; "loops" and "loss" per token, weighted
    by token; "error", the standard error over rows of the difference from the
    loss with all loops.
  """
  model = evaluated.settings.model
  if not isinstance(model, melt.Config) or model.exit_gate == "none":
    return []
  num_loops = evaluated.settings.eval_loops
  if num_loops == 1:
    return []
  batch = {name: x[:_NUM_SKIPPING_ROWS] for name, x in evaluated.batch.items()}
  weights = batch["weights"]
  if "documents" in batch:
    weights = weights * (batch["documents"] == batch["documents"][:, :1])
  results = []
  for rule in RULES:
    read = jax.jit(
      functools.partial(
        _read_tokens,
        graphdef=evaluated.graphdef,
        rule=rule,
        num_loops=num_loops,
      )
    )
    all_loops = None
    for threshold in reversed(SKIPPING_THRESHOLDS):
      losses, loops = jax.device_get(
        read(evaluated.params, batch["inputs"], batch["targets"], threshold)
      )
      all_loops = losses if all_loops is None else all_loops
      results.append(
        {
          "rule": rule,
          "threshold": threshold,
          **_means(losses, loops, weights, all_loops),
        }
      )
  return results


def _read_tokens(
  params: Any,
  inputs: Array,
  targets: Array,
  threshold: Array,
  *,
  graphdef: Any,
  rule: str,
  num_loops: int,
) -> tuple[Array, Array]:
  """Losses, f32 [B, T], and loops [B, T] of texts, token by token."""
  model: melt.Model = nnx.merge(graphdef, params)
  batch, num_tokens = inputs.shape
  policy = exits.ExitPolicy(
    jnp.full(batch, threshold), jnp.full(batch, num_loops), rule
  )

  def step(cache: Any, token: Array) -> tuple[Any, tuple[Array, Array]]:
    output, cache = melt.read(
      model, token[:, None], cache, num_loops=num_loops, exit_policy=policy
    )
    return cache, (output.hidden[:, 0], output.stats["loops_run"])

  cache = melt.empty_cache(model, batch, num_tokens)
  _, (hidden, loops) = jax.lax.scan(step, cache, inputs.T)
  losses = token_losses.next_token_by_loop(
    model, jnp.swapaxes(hidden, 0, 1)[None], targets
  )
  return losses[0], loops.T


def skipping_scores(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """For each rule, the fewest loops per token that lose at most `MOST_LOST`.

  A rule with non-finite losses has no score.
  """
  best = {}
  for rule in RULES:
    rows = [row for row in results if row["rule"] == rule]
    max_loss = (1 + MOST_LOST) * rows[0]["loss"]  # rows[0] has no exits.
    if loops := [row["loops"] for row in rows if row["loss"] <= max_loss]:
      best[f"loops_by_{rule}"] = min(loops)
  return best


def draw_skipping(
  evaluated: evaluated_lib.EvaluatedModel, results: Sequence[Mapping[str, Any]]
) -> list[pathlib.Path]:
  """skipping.png and .json: loss against loops per token."""
  gate, change = (
    [row for row in results if row["rule"] == rule] for rule in RULES
  )
  return _draw(
    evaluated,
    "skipping",
    (
      (gate, draw.BLUE, "exit by the looped model's gate"),
      (change, draw.ORANGE, "exit by change of the state"),
    ),
    f"Loss by number of loops, out of {evaluated.settings.eval_loops}; "
    "later tokens do not see skipped loops either",
    {"exits": list(results)},
  )
