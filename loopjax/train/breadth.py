"""Scores of examples that the model thinks about from several starts.

A row of a device call is a start of an example. Examples take turns, and one
that needs no further start gives its rows to the next, so calls are full until
the last. The scores of finished examples can be kept in a file, from which an
interrupted evaluation continues.
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import pipeline
from loopjax.errors import unreadable
from loopjax.loop import starts as starts_lib
from loopjax.run import processes

_DELAY = 2.0  # Seconds without a progress bar.
Row = dict[str, Any]  # A finished example: its groups and its scores.


class Kept:
  """A file of finished examples, from which an evaluation continues.

  Its first line says what the scores are of; a file of anything else is
  replaced. Then follows a line for each example: its number, and its row.
  """

  def __init__(self, path: pathlib.Path, of: Mapping[str, Any]):
    """The arguments are the file, and what the scores depend on, as JSON."""
    self._path, self._head = path, json.dumps({"of": of}, sort_keys=True)

  def read(self) -> dict[int, Row]:
    """The finished examples' rows by number, on every process."""
    found = processes.from_process_0(self._lines)
    return {number: _from_json(row) for number, row in found}

  def _lines(self) -> list[Any]:
    """What process 0 has kept; begins the file anew if it has nothing."""
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      text = self._path.read_text("utf-8") if self._path.exists() else ""
      head, *lines = text.split("\n")
      # What follows the last line break was not written whole.
      found = [json.loads(x) for x in lines[:-1]] if head == self._head else []
      whole = [self._head, *map(json.dumps, found), ""]
      self._path.write_text("\n".join(whole), "utf-8")
    except OSError as error:
      raise unreadable(str(self._path), error) from error
    if found:
      print(f"continues after {len(found):,} examples", flush=True)
    return found

  def add(self, rows: Mapping[int, Row]) -> None:
    """Adds finished examples."""
    if rows and jax.process_index() == 0:
      with self._path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows.items())

  def remove(self) -> None:
    """Removes the file of an evaluation that is complete."""
    if jax.process_index() == 0:
      self._path.unlink(missing_ok=True)


def _from_json(row: Row) -> Row:
  scores = {
    name: tuple(x) if isinstance(x, list) else x
    for name, x in row["scores"].items()
  }
  return {**row, "scores": scores}


class _Example:
  """An example with starts to run: its number, its row, and starts given."""

  def __init__(self, number: int, row: Mapping[str, np.ndarray]):
    self.number, self.row, self.given = number, row, 0


class _Picked(NamedTuple):
  """The example and the start of a row of a call."""

  example: _Example
  start: int


def scored(
  program: program_lib.Program,
  step: Callable[..., Any],
  batches: Sequence[Mapping[str, Any]],
  params: Any,
  starts: starts_lib.Starts,
  between: Callable[[], None],
  kept: Kept | None = None,
) -> dict[str, Any]:
  """The rows of all examples that count, with the scores of their answers.

  Args:
    program: the run's program.
    step: the compiled `eval_step`.
    batches: of the examples, see `types.Dataset`.
    params: the parameters.
    starts: how many starts, and which one answers.
    between: called before every call; may raise.
    kept: where finished examples are kept; read first.
  """
  mesh, size = program.mesh, program.settings.eval.batch_size
  finished = kept.read() if kept else {}
  places = sharding.local_rows(mesh, size)
  last = int(np.sum(batches[-1]["valid"]))
  num = (len(batches) - 1) * len(places) + last
  if mesh.size == 1:  # No rows are empty if there is less to do.
    size = min(size, num * starts.num)
  room = len(sharding.local_rows(mesh, size))
  queue = _examples(batches, places, program.settings.eval.batch_size, finished)
  at_work: list[_Example] = []
  found: dict[int, list[Any]] = {}
  bar = tqdm.tqdm(
    total=num * jax.process_count(),
    initial=len(finished),
    unit=" examples",
    disable=None,
    delay=_DELAY,
    leave=False,
  )
  with bar:
    while True:
      between()
      at_work = [x for x in at_work if x.number not in finished]
      while len(at_work) < room and (example := next(queue, None)):
        at_work.append(example)
      picked = _picked(at_work, starts.num, room)
      if not picked and jax.process_count() == 1:
        break
      batch = _batch(picked, room, batches[0])
      result = jax.device_get(
        step(params, sharding.put_batch(mesh, batch, size))
      )
      if not result["valid"].any():
        break  # No process has any.
      new = _take(result, found, starts)
      finished |= new
      bar.update(len(new))
      if kept:
        kept.add(new)
  rows = [finished[number] for number in sorted(finished)]
  return jax.tree.map(lambda *values: np.array(values), *rows)


def _examples(
  batches: Sequence[Mapping[str, Any]],
  places: np.ndarray,
  size: int,
  finished: Mapping[int, Row],
) -> Iterator[_Example]:
  """This process's examples that are not finished.

  Args:
    batches: this process's rows of the batches.
    places: of these rows in a batch.
    size: rows of a batch.
    finished: by number; examples are numbered in the order of the split.
  """
  for index, batch in enumerate(pipeline.iterate(batches)):
    for row in np.flatnonzero(batch["valid"]):
      number = index * size + int(places[row])
      if number not in finished:
        yield _Example(
          number, {k: np.asarray(x)[row] for k, x in batch.items()}
        )


def _picked(examples: list[_Example], num: int, room: int) -> list[_Picked]:
  """The next starts of examples in turns, at most `room`; counts them."""
  picked: list[_Picked] = []
  while len(picked) < room:
    left = [x for x in examples if x.given < num][: room - len(picked)]
    if not left:
      break
    for example in left:
      picked.append(_Picked(example, example.given))
      example.given += 1
  return picked


def combined(shapes: Mapping[str, Any], starts: starts_lib.Starts) -> Row:
  """A finished example of zeros, from the shapes of `eval_step`'s result."""
  scores, answers = jax.tree.map(
    lambda x: np.zeros((1, *x.shape[1:]), x.dtype),
    (shapes["scores"], shapes["answers"]),
  )
  groups = {name: 0 for name in shapes if name.startswith("group/")}
  found = starts_lib.combined(scores, answers, starts)
  return {"valid": True, **groups, "scores": found}


def with_starts(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The first start of each example of a batch."""
  zeros = np.zeros(len(batch["inputs"]), np.int32)
  return {**batch, "start": zeros, "example": zeros}


def _batch(
  picked: list[_Picked], room: int, like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """The rows of a call; copies of the first that do not count fill it."""
  rows = [x.example.row for x in picked]
  rows = rows or [{k: np.asarray(x)[0] for k, x in like.items()}]
  order = [i if i < len(picked) else 0 for i in range(room)]
  batch = {k: np.stack([rows[i][k] for i in order]) for k in rows[0]}

  def numbers(values: list[int]) -> np.ndarray:
    padded = values + [0] * (room - len(values))
    return np.array(padded, np.int32)

  return {
    **batch,
    "valid": np.arange(room) < len(picked),
    "start": numbers([x.start for x in picked]),
    "example": numbers([x.example.number for x in picked]),
  }


def _take(
  result: Mapping[str, Any],
  found: dict[int, list[Any]],
  starts: starts_lib.Starts,
) -> dict[int, Row]:
  """Adds the starts of a call to those found; returns finished examples.

  Args:
    result: of `eval_step`, of the rows of all processes.
    found: (scores, answers) of the starts of each unfinished example, by its
      number and in the order of the starts.
    starts: how many starts there are.
  """
  complete = {}
  for row in np.flatnonzero(result["valid"]):
    number = int(result["example"][row])
    of_row = jax.tree.map(lambda x, row=row: x[row], dict(result))
    so_far = found.setdefault(number, [])
    so_far.append((of_row["scores"], of_row["answers"]))
    sure = of_row["answers"].confidence >= starts.certain
    if sure or len(so_far) == starts.num:
      complete[number] = of_row
  finished = {}
  for number, of_row in complete.items():
    parts = found.pop(number)
    scores, answers = jax.tree.map(lambda *x: np.stack(x), *parts)
    groups = {k: int(x) for k, x in of_row.items() if k.startswith("group/")}
    chosen = starts_lib.combined(scores, answers, starts)
    finished[number] = {"valid": True, **groups, "scores": chosen}
  return finished
