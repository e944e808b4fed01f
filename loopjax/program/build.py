"""The compiled parts of a run: train state and train step, on a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn import lora, remat
from loopjax.optim import chain, parameters
from loopjax.program import gradients, step
from loopjax.program.state import (
  abstract_model,
  casts_parameters,
  initial_state,
  num_bytes,
  param_shardings,
  specs_of,
  state_shardings,
  with_shardings,
)
from loopjax.types import LoopOptions

# XLA's options of the train step, by platform. They stop two GPU passes: one
# computes a product that the backward pass needs twice, for the next operation
# and for the stack of all loops' residuals; the other merges products that
# share an operand, and copies their other operands and results to do so
# (benchmarks/results/2026-11-28_accelerators.md).
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
  "gpu": {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
  }
}


class Program(NamedTuple):
  """The functions and layouts of a run; holds no arrays.

  Attributes:
    settings: the run's settings.
    mesh: the mesh of devices.
    graphdef: the model without its parameters.
    schedule: compiled function from the step (from 0) to the learning rate.
    costs: FLOPs of the model with the number of loops in training, see
      `protocols.Family.costs`.
    init: compiled function from a random key to the sharded train state.
    train: compiled function (state, stacked batches, the teacher's parameters)
      -> (state, metrics of every step). It donates the state, except with
      run.debug_nans, which may reuse it.
    uncompiled: `train` before compilation.
    abstract_state: shapes, dtypes and shardings of the train state.
    abstract_params: the same for the model's parameters, those of the state
      unless it has pairs of `nn.lora`.
    abstract_teacher: the same for the teacher's parameters; {} without a
      teacher.
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
  abstract_params: Any
  abstract_teacher: Any
  teacher: config_lib.Settings | None

  def scored_params(self, state: step.TrainState) -> Any:
    """The model's parameters to evaluate, see `step.scored_params`."""
    return step.scored_params(state, self.settings.optim.lora_alpha)


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
  """
  mesh = sharding.make_mesh(settings.mesh, devices or jax.devices())
  _check_mesh(settings, mesh)
  platform = mesh.devices.flat[0].platform
  settings = settings._replace(loop=remat.resolve(settings.loop, platform))
  family = settings.family
  graphdef, model_params = abstract_model(settings)
  parameters.check_registered(model_params)
  if teacher:
    loop = dataclasses.replace(
      teacher.loop,
      kernels=settings.loop.kernels,
      remat="none",  # A teacher has no gradients.
    )
    teacher = teacher._replace(loop=loop)
  teacher_graphdef, teacher_params = (
    abstract_model(teacher) if teacher else (None, {})
  )

  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  init = functools.partial(initial_state, settings, tx)
  shapes = jax.eval_shape(init, jax.random.key(0))
  if ":" in settings.optim.name:  # The user's: before anything is written.
    jax.eval_shape(tx.update, shapes.params, shapes.opt_state, shapes.params)
  adapted, frozen = _adapted(shapes)

  params_sharding = functools.partial(
    param_shardings, mesh, settings.mesh.min_split_size
  )
  shardings = state_shardings(
    mesh, shapes, tx, *map(params_sharding, (shapes.params, shapes.base))
  )
  teacher_shardings = params_sharding(teacher_params)
  layout = gradients.Layout(
    # Also split within examples, a compiler would reshard by copying it all.
    gather="use" if mesh.shape["tensor"] > 1 else settings.mesh.gather,
    casts=casts_parameters(settings) or casts_parameters(teacher),
    params=specs_of(params_sharding(adapted)),
    frozen=(specs_of(teacher_shardings), specs_of(params_sharding(frozen))),
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
    layout=layout,
    alpha=settings.optim.lora_alpha,
  )
  return Program(
    settings=settings,
    mesh=mesh,
    graphdef=graphdef,
    schedule=jax.jit(
      chain.make_schedule(settings.optim, settings.run.num_steps)
    ),
    costs=family.costs(settings.model, settings.spec, settings.model.num_loops),
    init=jax.jit(init, out_shardings=shardings),
    train=jax.jit(
      train,
      donate_argnums=() if settings.run.debug_nans else 0,
      out_shardings=(shardings, sharding.replicated(mesh)),
      compiler_options=COMPILER_OPTIONS.get(platform),
    ),
    uncompiled=train,
    abstract_state=with_shardings(shapes, shardings),
    abstract_params=with_shardings(model_params, params_sharding(model_params)),
    abstract_teacher=with_shardings(teacher_params, teacher_shardings),
    teacher=teacher,
  )


def _check_mesh(settings: config_lib.Settings, mesh: Mesh) -> None:
  """Raises UserError if the mesh does not fit the kernels or the batches."""
  check_kernels(settings.loop, mesh.devices.flat[0], mesh.shape["tensor"])
  run, size = settings.run, settings.eval.batch_size
  sharding.check_batch_size(
    mesh, run.batch_size, "run.batch_size", run.num_microbatches
  )
  sharding.check_batch_size(mesh, size, "eval.batch_size")


def _adapted(shapes: step.TrainState) -> tuple[Any, Any]:
  """The abstract parameters with gradients in a step, and the others."""
  if not shapes.base:
    return shapes.params, {}
  adapted = jax.eval_shape(
    lambda state: lora.adapted(state.base, state.params, 1.0), shapes
  )
  return adapted, lora.rest(shapes.base, adapted)


def cache_bytes(
  settings: config_lib.Settings, kind: str | None = None
) -> tuple[int, int]:
  """Size of a cache: (bytes per token, other bytes per row).

  Args:
    settings: the run's settings. If the family does not predict next tokens,
      the result is (0, 0).
    kind: the kind of cache; the family's default if None.
  """
  reading = settings.family.reading
  if reading is None:
    return 0, 0
  graphdef, params = abstract_model(settings)

  def size(max_tokens: int) -> int:
    def make(params: Any) -> Any:
      model, loops = nnx.merge(graphdef, params), settings.eval_loops
      return reading.empty_cache(
        model, 1, max_tokens, num_loops=loops, kind=kind
      )

    return num_bytes(jax.eval_shape(make, params))

  by_token = size(2) - size(1)
  return by_token, size(1) - by_token


def have_kernels(device: Any, kernels: str) -> bool:
  """Whether a device supports these loop.kernels; GPU kernels need Hopper."""
  hopper = str(getattr(device, "compute_capability", "9.0")).startswith("9.")
  matches = device.platform == kernels and (kernels != "gpu" or hopper)
  return kernels == "xla" or matches


def check_kernels(options: LoopOptions, device: Any, tensor: int = 1) -> None:
  """Raises UserError if a mesh cannot run the kernels.

  Args:
    options: the run's options.
    device: any device of the mesh.
    tensor: number of devices over which each example is split.
  """
  if not have_kernels(device, options.kernels):
    machine = {"gpu": "Hopper GPU", "tpu": "TPU"}[options.kernels]
    raise UserError(
      f"loop.kernels={options.kernels!r} needs a {machine}, not"
      f" {device.device_kind}; loop.kernels='xla' runs on any device"
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
  batch = settings.task_module.abstract_batch(
    settings.task, settings.run.batch_size
  )
  batch_sharding = sharding.batch_sharding(mesh, stacked=True)
  return {
    name: jax.ShapeDtypeStruct(
      (settings.run.steps_per_call, *entry.shape),
      entry.dtype,
      sharding=batch_sharding,
    )
    for name, entry in batch.items()
  }


def check_step(program: Program) -> None:
  """Traces the train step if it has kernels, before anything is written."""
  kernels = program.settings.loop.kernels
  if kernels == "xla":
    return
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


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
  """The function, traced under the mesh; see `sharding.split_by_example`."""

  @functools.wraps(function)
  def traced(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args, **kwargs)

  return traced
