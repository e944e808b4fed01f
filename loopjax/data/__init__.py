"""Tasks by name; their batches and scores, compared with what they say."""

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loopjax.errors import UserError
from loopjax.protocols import Registry, Task
from loopjax.types import Dataset, TaskSpec

if TYPE_CHECKING:  # Checks each task against the protocol.
  from loopjax.data.arithmetic import task as arithmetic
  from loopjax.data.automaton import task as automaton
  from loopjax.data.depo import task as depo
  from loopjax.data.gsm import task as gsm
  from loopjax.data.maze import task as maze
  from loopjax.data.multihop import task as multihop
  from loopjax.data.sudoku import task as sudoku
  from loopjax.data.text import task as text

  _COMPARED: tuple[Task, ...] = (
    arithmetic,
    automaton,
    depo,
    gsm,
    maze,
    multihop,
    sudoku,
    text,
  )


def _task(module: types.ModuleType) -> Task:
  names = [name for name in vars(Task) if not name.startswith("_")]
  if missing := [name for name in names if not hasattr(module, name)]:
    raise UserError(
      f"{module.__name__} does not define {', '.join(missing)}; see"
      " loopjax.protocols.Task"
    )
  task: Any = module
  return task


TASKS = Registry(
  "task",
  _task,
  {
    "arithmetic": "loopjax.data.arithmetic.task",
    "automaton": "loopjax.data.automaton.task",
    "depo": "loopjax.data.depo.task",
    "gsm": "loopjax.data.gsm.task",
    "maze": "loopjax.data.maze.task",
    "multihop": "loopjax.data.multihop.task",
    "sudoku": "loopjax.data.sudoku.task",
    "text": "loopjax.data.text.task",
  },
)

# Batches; Grain gives a repeated data set the length 2^63 - 1.
_ENDLESS = 2**40


def check_dataset(
  task: Any, config: Any, split: str, num_rows: int, dataset: Dataset
) -> Dataset:
  """The dataset, whose first batch was compared with the task's description.

  Args:
    task: the module.
    config: the task's config.
    split: "train", or a split for evaluation.
    num_rows: rows of a batch in this process.
    dataset: from `make_dataset`.
  """
  import grain

  label = f"{task.__name__}.make_dataset, split {split!r}"
  batches = getattr(dataset, "batches", dataset)
  if not (
    isinstance(dataset, Dataset) and isinstance(batches, grain.MapDataset)
  ):
    raise UserError(
      f"{label}: returned {type(dataset).__name__} with batches of"
      f" {type(batches).__name__}, expected Dataset with a grain.MapDataset"
    )
  if not len(batches):
    raise UserError(f"{label}: there are no batches")
  if split == "train" and len(batches) < _ENDLESS:
    raise UserError(
      f"{label}: ends after batch {len(batches):,}, expected endless batches,"
      " such as those of .repeat()"
    )
  batch: Mapping[str, Any] = batches[0]
  described = task.abstract_batch(config, num_rows)
  expected = {name: (x.shape, x.dtype) for name, x in described.items()}
  if split != "train":
    groups = {f"group/{name}": np.int32 for name in dataset.groups}
    for name, dtype in {"valid": np.bool_, **groups}.items():
      expected[name] = (num_rows,), np.dtype(dtype)
  wrong = []
  for name, (shape, dtype) in expected.items():
    if name not in batch:
      wrong.append(f"batches have no {name!r}, {dtype} {list(shape)}")
      continue
    array = np.asarray(batch[name])
    if (array.shape, array.dtype) != (shape, dtype):
      wrong.append(
        f"{name!r} is {array.dtype} {list(array.shape)}, but {dtype}"
        f" {list(shape)} in abstract_batch"
      )
  if wrong:
    raise UserError(f"{label}: {'; '.join(wrong)}")
  spec: TaskSpec = task.spec(config)
  for name in ("inputs", "targets"):
    low, high = int(batch[name].min()), int(batch[name].max())
    if low < 0 or high >= spec.vocab_size:
      raise UserError(
        f"{label}: {name!r} has tokens from {low} to {high}, which are not in"
        f" [0, {spec.vocab_size}), the vocabulary of spec"
      )
  return dataset


def check_scores(
  task: Any, scores: Mapping[str, Any], num_rows: int
) -> Mapping[str, Any]:
  """What `score` returned, compared with the task's description."""
  for name, value in scores.items():
    for part in value if isinstance(value, tuple) else (value,):
      if np.shape(part) != (num_rows,):
        raise UserError(
          f"{task.__name__}.score: {name!r} has shape {list(np.shape(part))},"
          f" expected [{num_rows}], a value per row"
        )
  for name in task.HEADLINE:
    if name not in scores:
      raise UserError(
        f"{task.__name__}.HEADLINE: score returns no {name!r}, but"
        f" {', '.join(scores)}"
      )
  return scores
