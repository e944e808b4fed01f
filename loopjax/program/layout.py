"""How the train state is split over the mesh."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding
from loopjax.optim import parameters
from loopjax.program import step
from loopjax.types import PRECISIONS, Carried


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
  """Shardings of the train state; EMA and moments follow their parameters.

  Args:
    mesh: the mesh of devices.
    shapes: the abstract state.
    tx: the optimizer.
    params, base: shardings of the parameters.
  """

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
    carried=Carried(
      jax.tree.map(
        lambda _: sharding.batch_sharding(mesh), shapes.carried.by_example
      ),
      jax.tree.map(lambda _: replicated, shapes.carried.shared),
    ),
    base=base,
  )
