"""The loss of recurrent depth, and the number of loops of a training step."""

from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.loop import depth as depth_lib
from loopjax.losses import tokens as token_losses
from loopjax.models.recurrent.config import Config
from loopjax.models.recurrent.model import Model
from loopjax.nn.keys import by_example, fold_in
from loopjax.protocols import AnyTeacher
from loopjax.types import Array, Batch, Metrics

_DEPTH = 2**31 - 1  # Folded into random keys; the model uses other numbers.


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """Cross-entropy after the drawn number of loops, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del teacher
  config, keys = model.config, by_example(key, batch)
  call: dict[str, Any] = {"documents": batch.get("documents"), "keys": keys}
  if _is_static(config):
    output = model(batch["inputs"], **call)
    return token_losses.output_loss(model, output, batch)
  depth = training_depth(config, key, keys, step)
  output = model(batch["inputs"], depth=depth, **call)
  total, metrics = token_losses.output_loss(model, output, batch)
  return total, {**metrics, "depth": jnp.mean(depth.astype(jnp.float32))}


def _is_static(config: Config) -> bool:
  """Whether every step runs K loops, all of them with a gradient."""
  growing = bool(config.growth_steps)
  return config.depth == "fixed" and not (config.num_with_gradient or growing)


def training_depth(
  config: Config, key: Array, keys: Array, step: Array
) -> Array:
  """The loops of a training step, i32 scalar, or [B] if drawn per row.

  Args:
    config: the model's config.
    key: key of the step, the same in all of its microbatches.
    keys: keys of the rows, [B].
    step: number of optimizer steps taken.
  """
  if config.depth == "fixed":
    growth = config.growth_steps, config.growth_loops
    return depth_lib.grown(step, *growth, config.num_loops)
  pmf = config.depths()
  if config.depth_per == "step":
    return depth_lib.draw(jax.random.fold_in(key, _DEPTH), pmf)
  row_keys: Any = fold_in(keys, _DEPTH)
  return jax.vmap(lambda key: depth_lib.draw(key, pmf))(row_keys)


def check_schedule(config: Config, num_steps: int) -> None:
  """See `Family.check_schedule`."""
  if config.growth_steps and config.growth_steps[-1] >= num_steps:
    raise UserError(
      f"model.growth_steps={config.growth_steps!r} must end before"
      f" run.num_steps={num_steps}: no step would run"
      f" model.num_loops={config.num_loops}"
    )
