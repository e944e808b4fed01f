"""The compiled parts of a run: train state and train step, on a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn import remat
from loopjax.optim import chain
from loopjax.program import step
from loopjax.program.layout import (
  param_shardings,
  state_shardings,
  with_shardings,
)
from loopjax.protocols import CarriesState, Model
from loopjax.types import Carried, LoopOptions


class Program(NamedTuple):
  """The functions and layouts of a run; holds no arrays.

  Attributes:
    settings: the run's settings.
    mesh: the mesh of devices.
    graphdef: the model without its parameters.
    schedule: function from the step, from 0, to the learning rate.
    costs: FLOPs of the model with the number of loops in training, see
      `protocols.Family.costs`.
    init: compiled function from a random key to the sharded train state.
    train: compiled function (state, stacked batches, the teacher's parameters)
      -> (state, metrics of every step). It donates the state, except with
      run.debug_nans, which may need it again.
    uncompiled: the function `train` before compilation.
    abstract_state: shapes, dtypes and shardings of the train state.
    abstract_teacher: those of the teacher's parameters; {} without a teacher.
    teacher: settings of the teacher's run; None without a teacher.
  """

  settings: config_lib.Settings
  mesh: Mesh
  graphdef: nnx.GraphDef
  schedule: optax.Schedule
  costs: Mapping[str, Any]
  init: Any
  train: Any
  uncompiled: Any
  abstract_state: step.TrainState
  abstract_teacher: Any
  teacher: config_lib.Settings | None


def make_program(
  settings: config_lib.Settings,
  devices: Sequence[Any] | None = None,
  teacher: config_lib.Settings | None = None,
) -> Program:
  """Traces the model and determines the sharding of the train state.

  Args:
    settings: the run's settings.
    devices: the devices to run on; all devices if None.
    teacher: settings of the teacher's run; None without a teacher.

  Raises:
    UserError: the mesh does not fit the batches or the parameters, or
      loop.kernels fit neither the devices nor the model.
  """
  mesh = sharding.make_mesh(settings.mesh, devices or jax.devices())
  platform = mesh.devices.flat[0].platform
  settings = _resolve_remat(settings, platform)
  check_kernels(settings.loop, mesh.devices.flat[0], mesh.shape["tensor"])
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
  params_sharding = functools.partial(
    param_shardings, mesh, settings.mesh.min_split_size
  )
  shardings = state_shardings(mesh, shapes, tx, params_sharding(shapes.params))
  if teacher:
    options = dataclasses.replace(teacher.loop, kernels=settings.loop.kernels)
    teacher = _resolve_remat(teacher._replace(loop=options), platform)
  teacher_graphdef, teacher_params = (
    abstract_model(teacher) if teacher else (None, {})
  )
  train = functools.partial(
    on_mesh(mesh, step.train_steps),
    graphdef=graphdef,
    teacher_graphdef=teacher_graphdef,
    loss_fn=family.loss,
    tx=tx,
    ema_decay=settings.optim.ema_decay,
    num_microbatches=settings.run.num_microbatches,
    max_bad_steps=settings.run.max_bad_steps,
  )
  program = Program(
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
    uncompiled=train,
    abstract_state=with_shardings(shapes, shardings),
    abstract_teacher=with_shardings(
      teacher_params, params_sharding(teacher_params)
    ),
    teacher=teacher,
  )
  if settings.loop.kernels != "xla":
    _check_step(program)  # Before anything is written.
  return program


def fresh_state(
  settings: config_lib.Settings, tx: optax.GradientTransformation, key: Any
) -> step.TrainState:
  """The train state before the first step, initialised from a random key."""
  params = nnx.to_pure_dict(
    nnx.state(_new_model(settings, jax.random.fold_in(key, 0)))
  )
  return step.init_state(
    params,
    tx,
    jax.random.fold_in(key, 1),
    settings.optim.ema_decay > 0,
    _init_carried(settings),
  )


def abstract_model(settings: config_lib.Settings) -> tuple[nnx.GraphDef, Any]:
  """(graphdef, shapes and dtypes of the parameters as a nested dict)."""
  model = nnx.eval_shape(lambda: _new_model(settings, jax.random.key(0)))
  graphdef, params = nnx.split(model)
  return graphdef, nnx.to_pure_dict(params)


def cache_bytes(
  settings: config_lib.Settings, kind: str | None = None
) -> tuple[int, int]:
  """Size of a cache: (bytes per token, other bytes per row).

  Args:
    settings: the run's settings. If the family does not predict next tokens,
      the result is (0, 0).
    kind: the kind of cache; the family's default if None.
  """
  family = settings.causal
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


def _resolve_remat(
  settings: config_lib.Settings, platform: str
) -> config_lib.Settings:
  """The settings with loop.remat="auto" resolved for the platform."""
  return settings._replace(loop=remat.resolve(settings.loop, platform))


def have_kernels(device: Any, kernels: str) -> bool:
  """Whether a device runs these loop.kernels; those for GPUs need Hopper."""
  hopper = str(getattr(device, "compute_capability", "9.0")).startswith("9.")
  here = device.platform == kernels and (kernels != "gpu" or hopper)
  return kernels == "xla" or here


def check_kernels(options: LoopOptions, device: Any, tensor: int = 1) -> None:
  """Raises UserError if a mesh cannot run the kernels.

  Args:
    options: the run's options.
    device: one of the mesh's.
    tensor: number of devices over which examples themselves are split.
  """
  if not have_kernels(device, options.kernels):
    machine = {"gpu": "Hopper GPU", "tpu": "TPU"}[options.kernels]
    raise UserError(
      f"loop.kernels={options.kernels!r} needs a {machine}, not"
      f" {device.device_kind}; loop.kernels='xla' runs anywhere"
    )
  if options.kernels != "xla" and tensor > 1:
    raise UserError(
      f"loop.kernels={options.kernels!r} needs mesh.tensor=1: kernels are not"
      " split within an example"
    )


def abstract_batches(
  settings: config_lib.Settings, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of the batches of one call: [steps, B, ...]."""
  one = settings.task_module.abstract_batch(
    settings.task, settings.run.batch_size
  )
  placed = sharding.batch_sharding(mesh, stacked=True)
  return {
    name: jax.ShapeDtypeStruct(
      (settings.run.steps_per_call, *entry.shape), entry.dtype, sharding=placed
    )
    for name, entry in one.items()
  }


def _check_step(program: Program) -> None:
  """Raises UserError if a kernel does not support the model, by tracing."""
  kernels = program.settings.loop.kernels
  batches = abstract_batches(program.settings, program.mesh)
  try:
    jax.eval_shape(
      program.uncompiled,
      program.abstract_state,
      batches,
      program.abstract_teacher,
    )
  except UserError as error:
    raise UserError(f"loop.kernels={kernels!r}: {error}") from error


def _new_model(settings: config_lib.Settings, key: Any) -> Model:
  """The model with parameters initialised from a random key."""
  rngs = nnx.Rngs(params=key)
  return settings.family.Model(
    settings.model, settings.spec, settings.loop, rngs=rngs
  )


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
  """The function, traced under the mesh; see `sharding.split_by_example`."""

  @functools.wraps(function)
  def traced(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return traced


def _init_carried(settings: config_lib.Settings) -> Carried:
  """The state that the first step carries; empty for most families."""
  if not isinstance(settings.family, CarriesState):
    return Carried()
  return settings.family.init_carried(
    settings.model, settings.spec, settings.run.batch_size
  )
