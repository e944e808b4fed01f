"""Evaluation questions in the form that the analyses need."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.data.multihop import language, task
from loopjax.types import Dataset


class Questions(NamedTuple):
  """N questions of up to H hops.

  Attributes:
    splits: names of all splits.
    split: index of each question's split, int [N].
    hops: h, hops of each question, int [N].
    inputs: token ids, i32 [N, T].
    last: position of the answer, int [N].
    hop_positions: for each hop 1, ..., h, the first position that sees
      everything on which it depends, int [N, H]; -1 past hop h.
    entities: token ids of a, of the bridges and of the answer, int [N, 1 + H];
      -1 past hop h.
    relations: token ids of r1, ..., rh, int [N, H]; -1 past hop h.
    random_entity: token id of an entity of the same graph that the question
      does not involve, drawn uniformly, int [N].
    role_exposure: each question's group by the number of its facts composed in
      the same position in training, int [N]; -1 for no group.
    role_exposure_names: "SPLIT/GROUP" of every group.
  """

  splits: tuple[str, ...]
  split: np.ndarray
  hops: np.ndarray
  inputs: np.ndarray
  last: np.ndarray
  hop_positions: np.ndarray
  entities: np.ndarray
  relations: np.ndarray
  random_entity: np.ndarray
  role_exposure: np.ndarray
  role_exposure_names: tuple[str, ...]

  @property
  def answers(self) -> np.ndarray:
    """Token id of each answer, int [N]."""
    return self.entities[np.arange(len(self.hops)), self.hops]

  @property
  def num_hops(self) -> int:
    """H, hops of the longest question."""
    return self.relations.shape[1]

  def by_split(self) -> Iterator[tuple[str, int, np.ndarray]]:
    """(name, h, rows int [n]) of every split that has questions."""
    for index, name in enumerate(self.splits):
      rows = np.flatnonzero(self.split == index)
      if len(rows):
        yield name, int(self.hops[rows[0]]), rows


def entity_name(hop: int, hops: int) -> str:
  """Name of the entity after a hop: "bridge1", ..., "answer"."""
  return "answer" if hop == hops else f"bridge{hop}"


def gather(config: task.Config, dataset: Dataset, num: int) -> Questions:
  """The first questions, shuffled, of the test and training splits.

  Args:
    dataset: the test split; the validation chains in it are skipped.
    num: number of questions; 0 for all.
  """
  batch = evaluated_lib.sample(dataset, 0)
  reported = [
    not name.startswith("validation_") for name in dataset.groups["split"]
  ]
  rows = np.flatnonzero(np.array(reported)[batch["group/split"]])
  rows = rows[: num or None]
  batch = {name: value[rows] for name, value in batch.items()}
  return from_batch(config, batch, dataset.groups)


def from_batch(
  config: task.Config,
  batch: Mapping[str, np.ndarray],
  groups: Mapping[str, tuple[str, ...]],
) -> Questions:
  """Questions of a batch of `task.make_dataset`; all of its examples are valid.

  `groups` has the names of the groups "split" and "role_exposure".
  """
  inputs, bridges = np.asarray(batch["inputs"]), np.asarray(batch["bridges"])
  num, max_hops = len(inputs), config.max_hops
  hops = (bridges >= 0).sum(axis=1)
  entities = np.full((num, 1 + max_hops), -1)
  relations = np.full((num, max_hops), -1)
  positions = np.full((num, max_hops), -1)
  last = np.empty(num, int)
  for count in np.unique(hops).tolist():
    rows = hops == count
    places = language.layout(config.format, count)
    entities[rows, 0] = inputs[rows, places.index(0)]
    entities[rows, 1 : count + 1] = bridges[rows, 1 : count + 1]
    for hop in range(1, count + 1):
      relations[rows, hop - 1] = inputs[rows, places.index(hop)]
    positions[rows, :count] = task.hop_positions(config, count)
    last[rows] = len(places) - 1
  return Questions(
    splits=groups["split"],
    split=np.asarray(batch["group/split"]),
    hops=hops,
    inputs=inputs,
    last=last,
    hop_positions=positions,
    entities=entities,
    relations=relations,
    random_entity=_random_entities(entities, config.num_entities),
    role_exposure=np.asarray(batch["group/role_exposure"]),
    role_exposure_names=groups["role_exposure"],
  )


def _random_entities(entities: np.ndarray, num_entities: int) -> np.ndarray:
  """An entity of the same graph that is not in the question, int [N].

  If the graph has no other entity, it is one of the question's.
  """
  graph = entities[:, :1] // num_entities  # 0 for A, 1 for B.
  own = np.where(entities >= 0, entities, entities[:, :1])
  noise = np.random.default_rng(0).random((len(entities), num_entities))
  np.put_along_axis(noise, own - graph * num_entities, 2.0, axis=1)
  return np.argmin(noise, axis=1) + graph[:, 0] * num_entities
