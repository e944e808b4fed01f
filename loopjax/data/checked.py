"""A task's batches and scores, compared with what the task says of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from loopjax.errors import UserError
from loopjax.types import Dataset, TaskSpec


def dataset(
  task: Any, config: Any, split: str, num_rows: int, found: Dataset
) -> Dataset:
  """The dataset, whose first batch was compared with the task's description.

  Args:
    task: the module.
    config: the task's config.
    split: "train", or a split for evaluation.
    num_rows: rows of a batch in this process.
    found: from `make_dataset`.

  Raises:
    UserError: an array is missing, has another shape or dtype than in
      `abstract_batch`, or has tokens outside of the vocabulary.
  """
  batch: Mapping[str, Any] = found.batches[0]
  of = f"{task.__name__}.make_dataset, split {split!r}"
  described = task.abstract_batch(config, num_rows)
  wanted = {name: (x.shape, x.dtype) for name, x in described.items()}
  if split != "train":
    groups = {f"group/{name}": np.int32 for name in found.groups}
    for name, dtype in {"valid": np.bool_, **groups}.items():
      wanted[name] = (num_rows,), np.dtype(dtype)
  for name, (shape, dtype) in wanted.items():
    if name not in batch:
      raise UserError(f"{of}: batches have no {name!r}, {dtype} {list(shape)}")
    array = np.asarray(batch[name])
    if (array.shape, array.dtype) != (shape, dtype):
      raise UserError(
        f"{of}: {name!r} is {array.dtype} {list(array.shape)}, but"
        f" {dtype} {list(shape)} in abstract_batch"
      )
  spec: TaskSpec = task.spec(config)
  for name in ("inputs", "targets"):
    low, high = int(batch[name].min()), int(batch[name].max())
    if low < 0 or high >= spec.vocab_size:
      raise UserError(
        f"{of}: {name!r} has tokens from {low} to {high}, which are not in"
        f" [0, {spec.vocab_size}), the vocabulary of spec"
      )
  return found


def scores(task: Any, found: Mapping[str, Any], num_rows: int) -> None:
  """Compares what `score` returned with the task's description.

  Raises:
    UserError: a score is not one value per row, or one of HEADLINE is missing.
  """
  for name, value in found.items():
    for part in value if isinstance(value, tuple) else (value,):
      if np.shape(part) != (num_rows,):
        raise UserError(
          f"{task.__name__}.score: {name!r} has shape {list(np.shape(part))},"
          f" expected [{num_rows}], a value per row"
        )
  for name in task.HEADLINE:
    if name not in found:
      raise UserError(
        f"{task.__name__}.HEADLINE: score returns no {name!r}, but"
        f" {', '.join(found)}"
      )
