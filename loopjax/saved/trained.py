"""The model of a run, loaded from its work directory."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.nn import remat
from loopjax.protocols import Model
from loopjax.run.checkpoints import quantized, restore


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
  workdir: pathlib.Path,
  checkpoint: int | None = None,
  *,
  kernels: bool = False,
  or_quantized: bool = False,
) -> TrainedModel:
  """Loads the model of a run, finished or in progress.

  Args:
    workdir: the run's work directory.
    checkpoint: step of the checkpoint; None for the newest intact one.
    kernels: whether the model uses loop.kernels if the device supports them;
      otherwise it uses XLA, which supports texts of any length.
    or_quantized: whether the parameters may be quantised, see
      `run.checkpoints.quantized`.

  Raises:
    UserError: the run or the checkpoint does not exist, or the checkpoint is
      damaged or from an incompatible version.
  """
  label = str(workdir)
  device = jax.local_devices()[0]
  settings = config_lib.of_run(workdir, label)._replace(mesh=sharding.Config())
  here = program_lib.have_kernels(device, settings.loop.kernels)
  if not (kernels and here):
    options = dataclasses.replace(settings.loop, kernels="xla")
    settings = settings._replace(loop=options)
  # Its gradient is taken by some who read it.
  loop = remat.resolve(settings.loop, device.platform)
  graphdef, params = program_lib.abstract_model(settings._replace(loop=loop))
  placed = sharding.replicated(sharding.make_mesh(settings.mesh, [device]))
  wanted = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), params
  )
  weights = quantized.stored_weights(workdir) if or_quantized else None
  if weights and checkpoint is None:
    params, step = quantized.read(workdir, wanted, weights), 0
  else:
    step, params = restore.chosen_params(workdir, checkpoint, wanted, label)
  return TrainedModel(settings, graphdef, params, step)
