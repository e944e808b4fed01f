"""Dashboards of a run: TensorBoard and, if configured, Weights & Biases."""

import importlib.util
import math
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
import tensorboardX

from loopjax.errors import UserError, one_line
from loopjax.run import workdir as workdir_lib


class Board(Protocol):
  """A dashboard that shows a run's numbers and images by step."""

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Adds {"split/name": number}."""

  def once(self, step: int, values: Mapping[str, Any]) -> None:
    """Adds {"split/name": number or vector over loops} of a run's end."""

  def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
    """Adds an image, [height, width, 3], f32 from 0 to 1."""

  def close(self) -> None:
    """Flushes and closes."""


class TensorBoard:
  """Event files under tb/; events of steps to be repeated are dropped.

  They have curves: what is known once is a curve over loops, or the score of a
  split. Standard errors and scores by group are in metrics.jsonl.
  """

  def __init__(self, workdir: pathlib.Path, start_step: int):
    purged = start_step + 1 if start_step else None
    self._writer = tensorboardX.SummaryWriter(
      str(workdir / "tb"), purge_step=purged
    )

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      if not name.endswith("/standard_error"):
        self._writer.add_scalar(name, value, step)

  def once(self, step: int, values: Mapping[str, Any]) -> None:
    whole = {name: x for name, x in values.items() if "=" not in name}
    vectors = {name: x for name, x in whole.items() if np.ndim(x)}
    for name, vector in vectors.items():
      for loops, value in enumerate(vector, 1):
        if math.isfinite(value):
          self._writer.add_scalar(f"{name}_by_loops", value, loops)
    scalars = {name: x for name, x in whole.items() if name not in vectors}
    self.numbers(step, workdir_lib.finite(scalars))

  def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
    self._writer.add_image(name, pixels, step, dataformats="HWC")

  def close(self) -> None:
    self._writer.close()


class WeightsAndBiases:
  """A run on Weights & Biases, resumed whenever the work directory is.

  Steps repeated after a restore are not recorded again.
  """

  def __init__(
    self, workdir: pathlib.Path, project: str, config: Mapping[str, Any]
  ):
    import wandb

    self._wandb = wandb
    run_id = workdir / ".wandb_run"
    if not run_id.exists():
      run_id.write_text(uuid.uuid4().hex, encoding="utf-8")
    try:
      self._run = wandb.init(
        project=project,
        id=run_id.read_text(encoding="utf-8"),
        name=workdir.name,
        dir=str(workdir),
        config=dict(config),
        resume="allow",
      )
    except Exception as error:  # Whatever the network or the library raises.
      raise UserError(
        f"run.wandb_project={project!r}: {one_line(error)};"
        " WANDB_MODE=offline needs no network and no account"
      ) from error

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=step)

  def once(self, step: int, values: Mapping[str, Any]) -> None:
    self.numbers(step, workdir_lib.finite(flat(values)))

  def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
    self._run.log({name: self._wandb.Image(pixels)}, step=step)

  def close(self) -> None:
    self._run.finish()


def flat(values: Mapping[str, Any]) -> dict[str, float]:
  """Scalars by name; the entries of a vector become name/loop=k."""
  scalars = {}
  for name, value in values.items():
    array = np.asarray(value, np.float64)
    if array.ndim == 0:
      scalars[name] = float(array)
    else:
      for loop, entry in enumerate(array):
        scalars[f"{name}/loop={loop}"] = float(entry)
  return scalars


def check(wandb_project: str) -> None:
  """Raises UserError if Weights & Biases is requested but not installed."""
  if wandb_project and importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"run.wandb_project={wandb_project!r} needs the package wandb:"
      " pip install 'loopjax[wandb]'"
    )


def open_all(
  workdir: pathlib.Path,
  start_step: int,
  wandb_project: str,
  config: Mapping[str, Any],
) -> list[Board]:
  """The boards of a run; only process 0 has any.

  Args:
    start_step: step from which it resumes.
    wandb_project: Weights & Biases project; "" for none.
    config: settings to record in the project.

  Raises:
    UserError: Weights & Biases does not answer.
  """
  if jax.process_index():
    return []
  boards: list[Board] = []
  if wandb_project:  # First: it may fail, and an open file must be closed.
    boards.append(WeightsAndBiases(workdir, wandb_project, config))
  return [TensorBoard(workdir, start_step), *boards]
