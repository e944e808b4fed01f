"""Two knowledge graphs without a common entity (DiscoLoop, section 2)."""

from typing import NamedTuple

import numpy as np


class Graph(NamedTuple):
  """Graphs A and B. Fact f is the edge (heads[f], relations[f], tails[f]).

  Entities 0..E-1 are A's and E..2E-1 are B's; relations are shared. The D facts
  of entity e have the numbers e D .. e D + D - 1, by ascending relation.

  Attributes:
    num_entities: E, entities of each graph.
    out_degree: D, facts per entity; their relations are distinct.
    relations: relation of each fact, int64 [2 E D].
    tails: tail entity of each fact, in the same graph, int64 [2 E D].
  """

  num_entities: int
  out_degree: int
  relations: np.ndarray
  tails: np.ndarray

  @property
  def num_facts(self) -> int:
    return len(self.tails)

  @property
  def heads(self) -> np.ndarray:
    """Entity that each fact is about, int64 [2 E D]."""
    return np.arange(self.num_facts) // self.out_degree


def make_graph(
  num_entities: int,
  num_relations: int,
  out_degree: int,
  rng: np.random.Generator,
) -> Graph:
  """Draws both graphs.

  Each entity gets a uniformly drawn set of relations. Tails are uniform over
  the same graph, so that a fact may lead back to its head.
  """
  noise = rng.random((2 * num_entities, num_relations))
  relations = np.sort(np.argsort(noise, axis=1)[:, :out_degree], axis=1)
  tails = rng.integers(num_entities, size=(2, num_entities * out_degree))
  tails[1] += num_entities
  return Graph(num_entities, out_degree, relations.ravel(), tails.ravel())
