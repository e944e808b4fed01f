"""Scores of a model, by the evaluation of the trainer."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.library import checked
from loopjax.train import evaluate as evaluate_lib
from loopjax.types import Dataset


class Split(grain.MapDataset):
  """The batches of a split.

  Attributes:
    groups: names of the groups of examples, see `types.Dataset`.
  """

  def __init__(self, dataset: Dataset):
    super().__init__(dataset.batches)
    self._batches, self.groups = dataset.batches, dataset.groups

  def __len__(self) -> int:
    return len(self._batches)

  def __repr__(self) -> str:
    shapes = {name: np.shape(array) for name, array in self[0].items()}
    return f"<Split of {len(self)} batches: {shapes}>"

  def __getitem__(self, index: Any) -> Any:
    return (
      self.slice(index) if isinstance(index, slice) else self._batches[index]
    )


def evaluate(
  model: Any, dataset: Any, num_loops: int | None
) -> dict[str, float]:
  """`Model.evaluate`."""
  settings = model.about.settings
  loops = checked.loops(settings, num_loops, settings.eval_loops)
  if not isinstance(dataset, grain.MapDataset) or "valid" not in dataset[0]:
    raise UserError(
      "evaluate expects an evaluation split: loopjax.datasets(...)"
      "['validation'] or ['test']"
    )
  scores = _evaluator(model.about, loops, dataset)(model.params, "")
  return {
    f"{split}/{name}" if split else name: value
    for split, values in scores.items()
    for name, value in values.items()
  }


@functools.lru_cache(maxsize=2)  # An evaluator keeps what it has compiled.
def _evaluator(
  about: Any, num_loops: int, dataset: grain.MapDataset
) -> evaluate_lib.Evaluator:
  """The trainer's evaluator of a dataset, whose split is ""."""
  settings: config_lib.Settings = about.settings
  batch = dataset[0]
  size = len(batch["inputs"])
  _check_batch(settings, batch, size)
  options = dataclasses.replace(
    settings.eval, batch_size=size, num_loops=num_loops
  )
  program = program_lib.make_program(
    settings._replace(eval=options, mesh=sharding.Config()),
    devices=jax.local_devices()[:1],
  )
  whole = Dataset(dataset, _groups(dataset), {})
  return evaluate_lib.make_evaluator(program, {"": whole})


def _check_batch(
  settings: config_lib.Settings, batch: Mapping[str, Any], size: int
) -> None:
  """Raises UserError for a batch that is not of the model's task."""
  checked.batch(settings, batch)
  wanted = settings.task_module.abstract_batch(settings.task, size)
  for name, array in wanted.items():
    if name not in batch or np.shape(batch[name]) != array.shape:
      raise UserError(
        f"batches of the task {settings.plain['task']['name']!r} have"
        f" {name!r} of shape {array.shape}, which these lack"
      )


def _groups(dataset: grain.MapDataset) -> Mapping[str, tuple[str, ...]]:
  """The groups of the split that a dataset was made from, if any."""
  if isinstance(dataset, Split):
    return dataset.groups
  for parent in dataset.parents:
    if found := _groups(parent):
      return found
  return {}
