"""Untrained train states, their sizes, and how they are split over the mesh."""

from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding
from loopjax.optim import parameters
from loopjax.program import step
from loopjax.protocols import Model
from loopjax.types import PRECISIONS, Carried


def initial_state(
  settings: config_lib.Settings, tx: optax.GradientTransformation, key: Any
) -> step.TrainState:
  """The train state before the first step, initialised from a random key."""
  return step.init_state(
    initial_params(settings, key),
    tx,
    jax.random.fold_in(key, 1),
    settings.optim.ema_decay > 0,
    init_carried(settings),
    settings.optim.adaptation,
  )


def initial_params(settings: config_lib.Settings, key: Any) -> Any:
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


def num_elements(tree: Any) -> int:
  """Elements of all arrays: the number of parameters, if the tree is these."""
  return sum(x.size for x in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
  """Bytes of all arrays."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def param_shardings(mesh: Mesh, min_split_size: int, params: Any) -> Any:
  """Shardings of the parameters, from the table in `optim.parameters`."""
  return sharding.parameter_shardings(
    mesh, params, parameters.splits(params), min_split_size
  )


def specs_of(shardings: Any) -> Any:
  """PartitionSpecs of NamedShardings."""
  return jax.tree.map(lambda x: x.spec, shardings)


def casts_parameters(settings: config_lib.Settings | None) -> bool:
  """Whether products use parameters in a dtype other than the stored one."""
  if settings is None:
    return False
  precision = PRECISIONS[settings.model.precision]
  return precision.compute != precision.params


def with_shardings(shapes: Any, shardings: Any) -> Any:
  """Abstract arrays with these shapes and shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def state_shardings(
  mesh: Mesh,
  shapes: step.TrainState,
  tx: optax.GradientTransformation,
  params: Any,
  base: Any,
) -> step.TrainState:
  """Shardings of the train state; EMA and moments follow their parameters."""

  def is_masked(moment: Any) -> bool:
    """Whether another optimizer updates the parameter."""
    return isinstance(moment, optax.MaskedNode)

  replicated = sharding.replicated(mesh)
  return step.TrainState(
    step=replicated,
    params=params,
    ema=params if shapes.ema else {},
    opt_state=optax.tree.map_params(
      tx,
      lambda moment, like: moment if is_masked(moment) else like,
      shapes.opt_state,
      params,
      transform_non_params=lambda _: replicated,
      is_leaf=is_masked,
    ),
    key=replicated,
    bad=jax.tree.map(lambda _: replicated, shapes.bad),
    carried=jax.tree.map(
      lambda _: sharding.batch_sharding(mesh), shapes.carried
    ),
    base=base,
  )
