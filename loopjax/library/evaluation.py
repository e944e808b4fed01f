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
from loopjax import sharding, train
from loopjax.errors import UserError
from loopjax.library import checked
from loopjax.optim import chain
from loopjax.sections import flatten
from loopjax.train import evaluate as evaluate_lib
from loopjax.train import score
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
  model: Any,
  dataset: str | grain.MapDataset,
  *,
  num_loops: int | None = None,
  num_starts: int | None = None,
  start_noise: float | None = None,
  answer: str | None = None,
  certain: float | None = None,
  per_example: bool = False,
  **settings: Any,
) -> dict[str, Any]:
  """The task's scores on a split, by the evaluation of `loopjax.main`.

  Args:
    dataset: "validation" or "test", the model's own; or such a split of
      `loopjax.datasets`, or a slice of it.
    num_loops: number of loops; as in evaluation if None.
    num_starts, start_noise, answer, certain: several starts of each example,
      which one answers, and when no more are needed, as in section eval of a
      config; the model's own if None.
    per_example: whether to return columns of a table, with a row per example,
      instead of means.
    settings: of the task, with which a split of the model's own is made, such
      as `test_csv="mine.csv"`.

  Returns:
    With `per_example` each score, f64 [N], not a number in an example that does
    not count for it, and the example's group by grouping, for
    `pandas.DataFrame`. Otherwise
    for each score its mean, "SCORE/standard_error", and both by group
    ("exact_match/rating=3-9"); "count", the number of examples. Splits within
    the dataset are scored apart: "SPLIT/SCORE".
  """
  here, whole = model.about.settings, ""
  starts = {
    "num_starts": num_starts, "start_noise": start_noise, "answer": answer,
    "certain": certain,
  }  # fmt: skip
  options = dataclasses.replace(
    here.eval,
    num_loops=checked.loops(here, num_loops, here.eval_loops),
    **{name: value for name, value in starts.items() if value is not None},
  )
  if isinstance(dataset, str) and dataset in ("validation", "test"):
    program = _program(of_task(here, settings), options)
    datasets = train.make_datasets(program.settings, program.mesh, [dataset])
    if per_example:
      return evaluate_lib.columns(program, datasets[dataset], model.params)
    evaluator, whole = evaluate_lib.make_evaluator(program, datasets), dataset
  elif (
    not isinstance(dataset, grain.MapDataset)
    or not len(dataset)
    or "valid" not in dataset[0]
  ):
    raise UserError(
      "evaluate expects an evaluation split: 'validation', 'test' or"
      " loopjax.datasets(...)['test']"
    )
  elif settings:
    raise UserError(
      f"evaluate: {', '.join(settings)} with a dataset; pass 'test'"
    )
  elif per_example:
    made = _of_dataset(model.about, options, dataset)
    return evaluate_lib.columns(*made, model.params)
  else:
    evaluator = _evaluator(model.about, options, dataset)
  return {
    name if split == whole else f"{split}/{name}": value
    for split, values in evaluator(model.params, whole).items()
    for name, value in values.items()
  }


def of_task(
  settings: config_lib.Settings, changes: Mapping[str, Any]
) -> config_lib.Settings:
  """Settings with other ones of the task; UserError if the model has not."""
  plain: Any = settings.plain
  config = config_lib.make(plain["model"]["name"], plain["task"]["name"])
  config_lib.override(config, flatten(plain))
  named = {f"task.{k}": checked.setting(k, x) for k, x in changes.items()}
  config_lib.set_by_user(config, named)
  changed = config_lib.resolve(config)
  score.check_tokens(plain["task"], changed)
  return changed


def _program(
  settings: config_lib.Settings, options: Any
) -> program_lib.Program:
  """The program of evaluations with these of section eval, on one device."""
  return program_lib.make_program(
    settings._replace(
      eval=options,
      mesh=sharding.Config(),
      optim=chain.without_own(settings.optim),
    ),
    devices=jax.local_devices()[:1],
  )


@functools.lru_cache(maxsize=2)  # An evaluator keeps what it has compiled.
def _evaluator(
  about: Any, options: Any, dataset: grain.MapDataset
) -> evaluate_lib.Evaluator:
  """The trainer's evaluator of a dataset, whose split is ""."""
  program, whole = _of_dataset(about, options, dataset)
  return evaluate_lib.make_evaluator(program, {"": whole})


def _of_dataset(
  about: Any, options: Any, dataset: grain.MapDataset
) -> tuple[program_lib.Program, Dataset]:
  """The program that evaluates a dataset, and the dataset with its groups."""
  size = len(dataset[0]["inputs"])
  _check_batch(about.settings, dataset[0], size)
  options = dataclasses.replace(options, batch_size=size)
  return _program(about.settings, options), Dataset(
    dataset, _groups(dataset), {}
  )


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
