"""How much memory the backward pass may use on a device.

Accelerators compute faster than they read memory, so the fastest policy of
`nn.remat` that fits is the one that recomputes the fewest products.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from loopjax import config as config_lib
from loopjax.nn import remat
from loopjax.optim import chain
from loopjax.program import fresh
from loopjax.types import PRECISIONS, Carried

# Of the memory beside the train state; the rest is for what a program holds for
# a moment.
SHARE = 0.8
# Of that memory, what whole parameters and their gradients may take.
GATHERED = 0.5


def with_remat(
  settings: config_lib.Settings,
  mesh: Mesh,
  memory: int | None = None,
  teacher: config_lib.Settings | None = None,
) -> config_lib.Settings:
  """The settings with loop.remat="auto" resolved.

  On a CPU it is the platform's policy; on an accelerator the first one, from
  the one that keeps all products, of which state, gradients and residuals fit.

  Args:
    settings: the run's settings.
    mesh: the mesh of devices.
    memory: bytes of a device; None asks it. If it does not know, all products
      are kept.
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
      kept = functools.partial(_kept, settings, mesh, teacher)
      policies = (x for x in remat.ON_ACCELERATORS if kept(x) <= free)
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
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype),
    carried.by_example,
  )

  teacher_graph, of_teacher = fresh.abstract_model(teacher or settings)
  of_teacher = of_teacher if teacher else {}

  def residuals(
    params: Any, batch: Any, by_example: Any, shared: Any, of_teacher: Any
  ) -> Any:
    batch = {
      **batch,
      "row": jnp.arange(num_examples, dtype=jnp.int32),
      "mean_weight": jnp.ones(()),
      "carried": Carried(by_example, shared),
    }

    teaches = nnx.merge(teacher_graph, of_teacher) if teacher else None

    def loss(params: Any) -> Any:
      model, step = nnx.merge(graphdef, params), jnp.zeros((), jnp.int32)
      key = jax.random.key(0)
      return settings.family.loss(model, batch, key, step, teaches)

    return jax.vjp(loss, params, has_aux=True)[1]

  kept = jax.eval_shape(
    residuals, params, batch, one, carried.shared, of_teacher
  )
  return _num_bytes(kept)


def _kept(
  settings: config_lib.Settings,
  mesh: Mesh,
  teacher: config_lib.Settings | None,
  policy: str,
) -> int:
  """Residuals of a microbatch on a device, with a policy."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  num_examples = settings.run.batch_size // settings.run.num_microbatches
  loop = dataclasses.replace(settings.loop, remat=policy)
  settings = settings._replace(loop=loop)
  return residual_bytes(settings, max(1, num_examples // ways), teacher)


def _state_bytes(settings: config_lib.Settings, mesh: Mesh) -> float:
  """Train state and gradients on a device, if all of it is split evenly."""
  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  state = jax.eval_shape(
    lambda key: fresh.fresh_state(settings, tx, key), jax.random.key(0)
  )
  ways = mesh.shape["fsdp"] * mesh.shape["tensor"]
  return (_num_bytes(state) + _num_bytes(state.params)) / ways


def gathering(
  settings: config_lib.Settings, mesh: Mesh, memory: int | None = None
) -> str:
  """When split parameters are gathered, see `gradients.Layout.gather`.

  Once a step, and gradients reduced once, if whole parameters and gradients
  take at most half of the memory beside the state; only parameters, if they do;
  otherwise at every use, as where examples are split, too: compilers then go
  from one split to another by copying everything.

  Args:
    settings, mesh, memory: as in `with_remat`; unknown memory is enough.
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


def _gathered_bytes(
  settings: config_lib.Settings,
) -> tuple[int, int]:
  """Bytes of whole parameters, and of whole gradients.

  The latter are a sum over microbatches and one over loops, twice each, for so
  compilers keep what loops carry; and a stack of those of layers, in the dtype
  of products.
  """
  _, params = fresh.abstract_model(settings)
  precision = PRECISIONS[settings.model.precision]
  number = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  compute, full = (
    jnp.dtype(x).itemsize for x in (precision.compute, precision.params)
  )
  sums = 2 + 2 * (settings.run.num_microbatches > 1)
  return number * compute, number * (sums * full + compute)


def _memory(mesh: Mesh) -> int | None:
  """Bytes of a device of this process: those of others do not tell theirs."""
  here = jax.process_index()
  own = (x for x in mesh.devices.flat if x.process_index == here)
  device = next(own, None)
  stats = device.memory_stats() if device else None
  return stats.get("bytes_limit") if stats else None


def _num_bytes(tree: Any) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
