"""A trained model, from the work directory of its run."""

import pathlib
from typing import Any, NamedTuple

import jax
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.protocols import Model
from loopjax.run import restore


class Trained(NamedTuple):
  """A run at a checkpoint, on one device.

  Attributes:
    settings: the run's settings, except the mesh, which is one device.
    graphdef: the model without its parameters.
    params: the parameters to evaluate: averaged, if the run averages.
    step: optimizer steps taken at the checkpoint.
  """

  settings: config_lib.Settings
  graphdef: nnx.GraphDef
  params: Any
  step: int

  def model(self) -> Model:
    """The model with its parameters."""
    return nnx.merge(self.graphdef, self.params)


def read(workdir: pathlib.Path, checkpoint: int | None = None) -> Trained:
  """Reads a checkpoint of a run, which may be in progress.

  Args:
    workdir: the run's work directory.
    checkpoint: step of the checkpoint; None for the newest intact one.

  Raises:
    UserError: there is no run or no such checkpoint, it is damaged, or it is
      from an incompatible version.
  """
  label = str(workdir)
  settings = config_lib.of_run(workdir, label)._replace(mesh=sharding.Config())
  program = program_lib.make_program(settings, jax.local_devices()[:1])
  step, params = restore.chosen_params(
    workdir, checkpoint, program.abstract_state.params, label
  )
  return Trained(settings, program.graphdef, params, step)
