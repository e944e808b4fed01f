"""Exits whose skipped loops are never run, for loops that share a token's row.

When a token of MELT (arXiv 2605.07721) exits, later tokens attend to the latent
of its last loop. Texts are therefore processed token by token, as in
generation, and the cost of an exit includes the effect on later tokens. The
paper does not study this (appendix F.2).
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.plots import draw
from loopjax.loop import exits
from loopjax.losses import tokens as token_losses
from loopjax.models import melt
from loopjax.run import workdir as workdir_lib
from loopjax.types import PRECISIONS, Array

THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # Last: no exits.
RULES = ("gate", "change")
MOST_LOST = 0.01  # Relative increase of the loss, in `scores`.
_NUM_ROWS = 64


def measure(evaluated: evaluated_lib.EvaluatedModel) -> list[dict[str, Any]]:
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
  if model.num_loops == 1:
    return []
  batch = {name: x[:_NUM_ROWS] for name, x in evaluated.batch.items()}
  weights = batch["weights"].astype(np.float64)
  if "documents" in batch:
    weights *= batch["documents"] == batch["documents"][:, :1]
  weights /= max(weights.sum(), 1e-9)
  found = []
  for rule in RULES:
    read = jax.jit(
      functools.partial(_read, graphdef=evaluated.graphdef, rule=rule)
    )
    all_loops = None
    for threshold in reversed(THRESHOLDS):
      losses, loops = jax.device_get(
        read(evaluated.params, batch["inputs"], batch["targets"], threshold)
      )
      all_loops = losses if all_loops is None else all_loops
      change = losses - all_loops
      off = np.sum(weights * (change - np.sum(weights * change)), axis=1)
      found.append({
        "rule": rule,
        "threshold": threshold,
        "loops": float(np.sum(weights * loops)),
        "loss": float(np.sum(weights * losses)),
        "error": float(np.sqrt(np.sum(off**2))),
      })  # fmt: skip
  return found


def _read(
  params: Any,
  inputs: Array,
  targets: Array,
  threshold: Array,
  *,
  graphdef: Any,
  rule: str,
) -> tuple[Array, Array]:
  """Losses, f32 [B, T], and loops [B, T] of texts, token by token."""
  model: melt.Model = nnx.merge(graphdef, params)
  batch, num_tokens = inputs.shape
  policy = exits.ExitPolicy(
    jnp.full(batch, threshold),
    jnp.full(batch, model.config.num_loops),
    rule,
  )

  def step(cache: Any, token: Array) -> tuple[Any, tuple[Array, Array]]:
    output, cache = melt.read(model, token[:, None], cache, exit_policy=policy)
    return cache, (output.hidden[:, 0], output.stats["loops_run"])

  cache = melt.empty_cache(model, batch, num_tokens)
  _, (hidden, loops) = jax.lax.scan(step, cache, inputs.T)
  losses = token_losses.next_token_by_loop(
    jnp.swapaxes(hidden, 0, 1)[None],
    model.readout_table(),
    {"targets": targets},
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )
  return losses[0], loops.T


def scores(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """For each rule, the fewest loops per token that lose at most `MOST_LOST`.

  A rule with non-finite losses has no score.
  """
  best = {}
  for rule in RULES:
    rows = [row for row in found if row["rule"] == rule]
    most = (1 + MOST_LOST) * rows[0]["loss"]  # rows[0] has no exits.
    if kept := [row["loops"] for row in rows if row["loss"] <= most]:
      best[f"loops_by_{rule}"] = min(kept)
  return best


def draw_curve(
  evaluated: evaluated_lib.EvaluatedModel, found: Sequence[Mapping[str, Any]]
) -> list[pathlib.Path]:
  """skipping.png and .json: loss against loops per token."""
  figure = draw.new(7.5, 4.6)
  axes = figure.subplots()
  for rule, color, label in (
    ("gate", draw.BLUE, "exit by the looped model's gate"),
    ("change", draw.ORANGE, "exit by change of the state"),
  ):
    rows = [row for row in found if row["rule"] == rule]
    loops, losses, errors = (
      [row[name] for row in rows] for name in ("loops", "loss", "error")
    )
    axes.errorbar(
      loops, losses, errors, color=color, marker="o", ms=4, capsize=2,
      label=label,
    )  # fmt: skip
  draw.tidy(
    axes,
    f"Loss by number of loops, out of {evaluated.settings.model.num_loops}; "
    "later tokens do not see skipped loops either",
    "loops per token",
    "nats per token, ±1 standard error of the difference",
  )
  axes.legend(frameon=False, fontsize=9)
  numbers = evaluated.directory / "skipping.json"
  workdir_lib.write_json(numbers, {"exits": list(found)})
  return [draw.save(figure, evaluated.directory / "skipping.png"), numbers]
