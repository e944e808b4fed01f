"""Fits the backward pass into a device's memory.

Accelerators are limited by memory bandwidth. The fastest policy of `nn.remat`
that fits is therefore the one that recomputes the fewest products.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax.nn import lora, remat
from loopjax.optim import chain
from loopjax.program import fresh
from loopjax.program.tree_size import num_bytes, num_elements
from loopjax.types import PRECISIONS, Carried

# Usable share of the memory beside the train state; the rest is for temporary
# arrays.
SHARE = 0.8
# Maximum share of that memory for gathered parameters and their gradients.
GATHERED = 0.5


def with_remat(
  settings: config_lib.Settings,
  mesh: Mesh,
  memory: int | None = None,
  teacher: config_lib.Settings | None = None,
) -> config_lib.Settings:
  """The settings with loop.remat="auto" resolved.

  On CPUs, the platform's policy. On accelerators, the first policy, starting
  with the one that keeps all products, for which state, gradients and residuals
  fit in memory.

  Args:
    settings: the run's settings.
    mesh: the mesh of devices.
    memory: bytes of memory per device; None queries the device. If unknown, all
      products are kept.
    teacher: settings of the teacher's run; None without a teacher.
  """
  device = mesh.devices.flat[0]
  options = remat.resolve(settings.loop, device.platform)
  if settings.loop.remat == "auto" and device.platform not in remat.AUTO:
    memory = _memory(mesh) if memory is None else memory
    if memory:
      free = SHARE * (memory - _state_bytes(settings, mesh))
      if mesh.shape["fsdp"] > 1:
        gather = gathering(settings, mesh, memory)
        weights, gradients = _gathered_bytes(settings)
        free -= weights * (gather != "use") + gradients * (gather == "step")
      residuals = functools.partial(
        _residuals_per_device, settings, mesh, teacher
      )
      policies = (x for x in remat.ON_ACCELERATORS if residuals(x) <= free)
      policy = next(policies, remat.ON_ACCELERATORS[-1])
      options = dataclasses.replace(options, remat=policy)
  return settings._replace(loop=options)


def residual_bytes(
  settings: config_lib.Settings,
  num_examples: int,
  teacher: config_lib.Settings | None = None,
) -> int:
  """Bytes of the residuals of a backward pass over a number of examples.

  Computed by tracing a forward pass with the current `loop.remat`.
  """
  graphdef, params = fresh.abstract_model(settings)
  batch = settings.task_module.abstract_batch(settings.task, num_examples)
  carried = jax.eval_shape(lambda: fresh.init_carried(settings))
  by_example_shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype),
    carried.by_example,
  )

  teacher_graph, teacher_params = fresh.abstract_model(teacher or settings)
  teacher_params = teacher_params if teacher else {}

  def residuals(
    params: Any, batch: Any, by_example: Any, shared: Any, teacher_params: Any
  ) -> Any:
    batch = {
      **batch,
      "row": jnp.arange(num_examples, dtype=jnp.int32),
      "mean_weight": jnp.ones(()),
      "carried": Carried(by_example, shared),
    }

    teacher_model = (
      nnx.merge(teacher_graph, teacher_params) if teacher else None
    )

    def loss(params: Any) -> Any:
      model, step = nnx.merge(graphdef, params), jnp.zeros((), jnp.int32)
      key = jax.random.key(0)
      return settings.family.loss(model, batch, key, step, teacher_model)

    return jax.vjp(loss, params, has_aux=True)[1]

  shapes = jax.eval_shape(
    residuals, params, batch, by_example_shapes, carried.shared, teacher_params
  )
  return num_bytes(shapes)


def _residuals_per_device(
  settings: config_lib.Settings,
  mesh: Mesh,
  teacher: config_lib.Settings | None,
  policy: str,
) -> int:
  """Bytes of a microbatch's residuals on a device, with a policy."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  num_examples = settings.run.batch_size // settings.run.num_microbatches
  loop = dataclasses.replace(settings.loop, remat=policy)
  settings = settings._replace(loop=loop)
  return residual_bytes(settings, max(1, num_examples // ways), teacher)


def _state_bytes(settings: config_lib.Settings, mesh: Mesh) -> float:
  """Bytes of train state and gradients per device, if all is split evenly.

  Of matrices with pairs of `nn.lora`, sums and their gradients exist too.
  """
  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  state = jax.eval_shape(
    lambda key: fresh.fresh_state(settings, tx, key), jax.random.key(0)
  )
  ways = mesh.shape["fsdp"] * mesh.shape["tensor"]
  gradient_bytes = num_bytes(state.params)
  if state.base:
    gradient_bytes += 2 * num_bytes(
      jax.eval_shape(
        lambda state: lora.adapted(state.base, state.params, 1.0), state
      )
    )
  return (num_bytes(state) + gradient_bytes) / ways


def gathering(
  settings: config_lib.Settings, mesh: Mesh, memory: int | None = None
) -> str:
  """When split parameters are gathered, see `gradients.Layout.gather`.

  "step" if gathered parameters and gradients take at most half of the memory
  beside the state; "weights" if the parameters do; otherwise "use". Also "use"
  if examples are split: compilers would then reshard by copying everything.

  Args:
    settings, mesh, memory: as in `with_remat`; unknown memory counts as enough.
  """
  if mesh.shape["tensor"] > 1:
    return "use"
  memory = _memory(mesh) if memory is None else memory
  if mesh.shape["fsdp"] == 1 or not memory:
    return "step"
  weights, gradients = _gathered_bytes(settings)
  free = GATHERED * (memory - _state_bytes(settings, mesh))
  if weights + gradients <= free:
    return "step"
  return "weights" if weights <= free else "use"


def _gathered_bytes(settings: config_lib.Settings) -> tuple[int, int]:
  """Bytes of gathered parameters, and of unreduced gradients.

  Gradients are sums over microbatches and over loops, each stored twice because
  compilers double-buffer loop carries, and a stack over layers in the dtype of
  products.
  """
  _, params = fresh.abstract_model(settings)
  precision = PRECISIONS[settings.model.precision]
  num_parameters = num_elements(params)
  compute, full = (
    jnp.dtype(x).itemsize for x in (precision.compute, precision.params)
  )
  sums = 2 + 2 * (settings.run.num_microbatches > 1)
  return num_parameters * compute, num_parameters * (sums * full + compute)


def _memory(mesh: Mesh) -> int | None:
  """Bytes of memory of a device of this process; others cannot be queried."""
  process = jax.process_index()
  local = (x for x in mesh.devices.flat if x.process_index == process)
  device = next(local, None)
  stats = device.memory_stats() if device else None
  return stats.get("bytes_limit") if stats else None
