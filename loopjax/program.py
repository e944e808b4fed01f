"""What a run compiles: the model laid out over the mesh, and its steps."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding, step
from loopjax.models import CAUSAL
from loopjax.nn import remat
from loopjax.optim import chain, parameters
from loopjax.protocols import CarriesState, Model
from loopjax.types import Carried


class Program(NamedTuple):
  """What is compiled for a run, before any array exists.

  Attributes:
    settings: of the run.
    mesh: of devices.
    graphdef: the model without its parameters.
    schedule: step (from 0) -> learning rate.
    costs: of the model at its trained number of loops, see
      `protocols.Family.costs`.
    init: key -> train state, created sharded.
    train: (state, stacked batches, the teacher's parameters) -> (state, metrics
      of every step); donates the state, unless run.debug_nans may need it
      again.
    step: the same, not compiled.
    abstract_state: shapes, dtypes and shardings of the train state.
    abstract_frozen: the same of the teacher's parameters; {} without one.
    teacher: settings of the teacher's run; None without one.
  """

  settings: config_lib.Settings
  mesh: Mesh
  graphdef: nnx.GraphDef
  schedule: optax.Schedule
  costs: Mapping[str, Any]
  init: Any
  train: Any
  step: Any
  abstract_state: step.TrainState
  abstract_frozen: Any
  teacher: config_lib.Settings | None


def make_program(
  settings: config_lib.Settings,
  devices: Sequence[Any] | None = None,
  teacher: config_lib.Settings | None = None,
) -> Program:
  """Traces the model and lays out its state over the devices.

  Args:
    settings: of the run.
    devices: to run on; all devices if None.
    teacher: settings of the teacher's run, if there is a teacher.

  Raises:
    UserError: the mesh does not fit the batches or the parameters.
  """
  mesh = sharding.make_mesh(settings.mesh, devices or jax.devices())
  platform = mesh.devices.flat[0].platform
  settings = _on_platform(settings, platform)
  sharding.check_batch_size(
    mesh,
    settings.run.batch_size,
    "run.batch_size",
    settings.run.num_microbatches,
  )
  sharding.check_batch_size(mesh, settings.eval.batch_size, "eval.batch_size")
  family = settings.family
  graphdef, _ = abstract_model(settings)
  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)

  init = functools.partial(fresh_state, settings, tx)
  shapes = jax.eval_shape(init, jax.random.key(0))
  place = functools.partial(
    _param_shardings, mesh, settings.mesh.min_split_size
  )
  shardings = _state_shardings(mesh, shapes, tx, place(shapes.params))
  teacher = teacher and _on_platform(teacher, platform)
  teacher_graphdef, frozen = abstract_model(teacher) if teacher else (None, {})
  train = functools.partial(
    on_mesh(mesh, step.train_steps),
    graphdef=graphdef,
    teacher=teacher_graphdef,
    loss_fn=family.loss,
    tx=tx,
    ema_decay=settings.optim.ema_decay,
    num_microbatches=settings.run.num_microbatches,
    max_bad_steps=settings.run.max_bad_steps,
  )
  return Program(
    settings=settings,
    mesh=mesh,
    graphdef=graphdef,
    schedule=chain.make_schedule(settings.optim, settings.run.num_steps),
    costs=family.costs(settings.model, settings.spec, settings.model.num_loops),
    init=jax.jit(init, out_shardings=shardings),
    train=jax.jit(
      train,
      donate_argnums=() if settings.run.debug_nans else 0,
      out_shardings=(shardings, sharding.replicated(mesh)),
    ),
    step=train,
    abstract_state=_placed(shapes, shardings),
    abstract_frozen=_placed(frozen, place(frozen)),
    teacher=teacher,
  )


def fresh_state(
  settings: config_lib.Settings, tx: optax.GradientTransformation, key: Any
) -> step.TrainState:
  """The state before the first step, drawn from a key."""
  params = nnx.to_pure_dict(
    nnx.state(_fresh(settings, jax.random.fold_in(key, 0)))
  )
  return step.init_state(
    params,
    tx,
    jax.random.fold_in(key, 1),
    settings.optim.ema_decay > 0,
    _init_carried(settings),
  )


def abstract_model(settings: config_lib.Settings) -> tuple[nnx.GraphDef, Any]:
  """(the model without its parameters, their shapes as a nested dict)."""
  model = nnx.eval_shape(lambda: _fresh(settings, jax.random.key(0)))
  graphdef, params = nnx.split(model)
  return graphdef, nnx.to_pure_dict(params)


def cache_bytes(
  settings: config_lib.Settings, kind: str | None = None
) -> tuple[int, int]:
  """Bytes of the buffers of a cache: by token, and by row whatever its length.

  Args:
    settings: of a model that predicts next tokens; else nothing is kept.
    kind: of the cache; the family's own if None.
  """
  family = CAUSAL.get(settings.plain["model"]["name"])
  if family is None:
    return 0, 0
  graphdef, params = abstract_model(settings)

  def size(max_tokens: int) -> int:
    def make(params: Any) -> Any:
      model, loops = nnx.merge(graphdef, params), settings.eval_loops
      return family.empty_cache(
        model, 1, max_tokens, num_loops=loops, kind=kind
      )

    buffers = jax.tree.leaves(jax.eval_shape(make, params))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in buffers)

  by_token = size(2) - size(1)
  return by_token, size(1) - by_token


def _on_platform(
  settings: config_lib.Settings, platform: str
) -> config_lib.Settings:
  """Settings with loop.remat="auto" resolved for the platform."""
  return settings._replace(loop=remat.resolve(settings.loop, platform))


def _fresh(settings: config_lib.Settings, key: Any) -> Model:
  rngs = nnx.Rngs(params=key)
  return settings.family.Model(
    settings.model, settings.spec, settings.loop, rngs=rngs
  )


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
  """The function, traced with the mesh visible to `sharding.by_example`."""

  @functools.wraps(function)
  def traced(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return traced


def _init_carried(settings: config_lib.Settings) -> Carried:
  """The carried state that the first step receives."""
  if not isinstance(settings.family, CarriesState):
    return Carried()
  return settings.family.init_carried(
    settings.model, settings.spec, settings.run.batch_size
  )


def _param_shardings(mesh: Mesh, min_split_size: int, params: Any) -> Any:
  """Shardings of the parameters, from the parameter table."""
  return sharding.parameter_shardings(
    mesh, params, parameters.splits(params), min_split_size
  )


def _placed(shapes: Any, shardings: Any) -> Any:
  """Abstract arrays with shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def _state_shardings(
  mesh: Mesh,
  shapes: step.TrainState,
  tx: optax.GradientTransformation,
  params: Any,
) -> step.TrainState:
  """EMA and optimizer moments are sharded like their parameter."""

  def is_masked(moment: Any) -> bool:
    """Whether the parameter belongs to another optimizer."""
    return isinstance(moment, optax.MaskedNode)

  replicated = sharding.replicated(mesh)
  return step.TrainState(
    step=replicated,
    params=params,
    ema=params if shapes.ema else {},
    opt_state=optax.tree.map_params(
      tx,
      lambda moment, where: moment if is_masked(moment) else where,
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
  )
