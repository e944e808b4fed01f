"""Untrained models and train states."""

from typing import Any

import jax
import optax
from flax import nnx

from loopjax import config as config_lib
from loopjax.program import step
from loopjax.protocols import Model
from loopjax.types import Carried


def fresh_state(
  settings: config_lib.Settings, tx: optax.GradientTransformation, key: Any
) -> step.TrainState:
  """The train state before the first step, initialised from a random key."""
  return step.init_state(
    fresh_params(settings, key),
    tx,
    jax.random.fold_in(key, 1),
    settings.optim.ema_decay > 0,
    init_carried(settings),
    settings.optim.adaptation,
  )


def fresh_params(settings: config_lib.Settings, key: Any) -> Any:
  """The model's parameters before the first step, a nested dict."""
  model = _new_model(settings, jax.random.fold_in(key, 0))
  return nnx.to_pure_dict(nnx.state(model))


def abstract_model(settings: config_lib.Settings) -> tuple[nnx.GraphDef, Any]:
  """(graphdef, shapes and dtypes of the parameters as a nested dict)."""
  model = nnx.eval_shape(lambda: _new_model(settings, jax.random.key(0)))
  graphdef, params = nnx.split(model)
  return graphdef, nnx.to_pure_dict(params)


def _new_model(settings: config_lib.Settings, key: Any) -> Model:
  """The model with parameters initialised from a random key."""
  rngs = nnx.Rngs(params=key)
  return settings.family.Model(
    settings.model, settings.spec, settings.loop, rngs=rngs
  )


def init_carried(settings: config_lib.Settings) -> Carried:
  """The state that the first step carries; empty for most families."""
  init = settings.family.init_carried
  if init is None:
    return Carried()
  return init(settings.model, settings.spec, settings.run.batch_size)
