"""The model of a run, loaded from its work directory."""

import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.nn import remat
from loopjax.protocols import Model
from loopjax.run.checkpoints import restore
from loopjax.types import PRECISIONS


class TrainedModel(NamedTuple):
  """The model of a run at a checkpoint, on one device.

  Attributes:
    settings: the run's settings, with a mesh of one device.
    graphdef: the model without its parameters.
    params: the parameters; their moving average if the run keeps one.
    step: number of optimizer steps before the checkpoint.
  """

  settings: config_lib.Settings
  graphdef: nnx.GraphDef
  params: Any
  step: int

  def model(self) -> Model:
    """The model with its parameters."""
    return nnx.merge(self.graphdef, self.params)


def read(
  workdir: pathlib.Path | str,
  checkpoint: int | None = None,
  *,
  kernels: bool = False,
) -> TrainedModel:
  """Loads the model of a run, finished or in progress.

  Args:
    workdir: the run's work directory, or zoo:NAME.
    checkpoint: step of the checkpoint; None for the newest intact one.
    kernels: whether to read it for generation, see `for_generation`, with
      loop.kernels if the device supports them; otherwise it uses XLA, which
      supports texts of any length.

  Raises:
    UserError: the run or the checkpoint does not exist, or the checkpoint is
      damaged or from an incompatible version.
  """
  label, workdir = str(workdir), pathlib.Path(workdir)
  device = jax.local_devices()[0]
  settings = config_lib.of_run(workdir, label)._replace(mesh=sharding.Config())
  has_kernels = program_lib.have_kernels(device, settings.loop.kernels)
  if not (kernels and has_kernels):
    options = dataclasses.replace(settings.loop, kernels="xla")
    settings = settings._replace(loop=options)
  # Its gradient is taken by some who read it.
  loop = remat.resolve(settings.loop, device.platform)
  used = settings._replace(loop=loop)
  graphdef, params = program_lib.abstract_model(used)
  placed = sharding.replicated(sharding.make_mesh(settings.mesh, [device]))
  expected = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), params
  )
  step, params = restore.chosen_params(workdir, checkpoint, expected, label)
  if kernels:
    graphdef, params = for_generation(used, graphdef, params, device.platform)
  return TrainedModel(settings, graphdef, params, step)


def for_generation(
  settings: config_lib.Settings,
  graphdef: nnx.GraphDef,
  params: Any,
  platform: str,
) -> tuple[nnx.GraphDef, Any]:
  """(graphdef, parameters) of a model that generates, in float32 on CPUs.

  XLA's CPU backend multiplies only float32. In bfloat16, every call would
  convert the parameters, and every write to a cache all of it, which takes ten
  times as long as the products. A line on standard error says it.

  Args:
    settings: the model's.
    graphdef: its structure, which is returned where nothing changes.
    params: its parameters, as stored.
    platform: of its device.
  """
  model: Any = settings.model
  if platform != "cpu" or PRECISIONS[model.precision].compute != jnp.bfloat16:
    return graphdef, params
  print(
    "on a CPU the model computes in float32, not in bfloat16", file=sys.stderr
  )
  model = dataclasses.replace(model, precision="float32")
  graphdef, _ = program_lib.abstract_model(settings._replace(model=model))
  return graphdef, jax.tree.map(_widened, params)


def _widened(x: Any) -> Any:
  return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
