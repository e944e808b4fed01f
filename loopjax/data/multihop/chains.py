"""Chains of facts: drawn without repetition, split, and grouped by roles.

The chains of k hops in one graph are the integers below E D^k: the first digit
is the first entity, every other digit the edge to follow. Distinct integers are
distinct questions: chains can be drawn without enumerating them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Graph(NamedTuple):
  """Two graphs without a common entity, A and B (DiscoLoop, section 2).

  Fact f is the edge (heads[f], relations[f], tails[f]).

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
  the same graph; a fact may lead back to its head.
  """
  noise = rng.random((2 * num_entities, num_relations))
  relations = np.sort(np.argsort(noise, axis=1)[:, :out_degree], axis=1)
  tails = rng.integers(num_entities, size=(2, num_entities * out_degree))
  tails[1] += num_entities
  return Graph(num_entities, out_degree, relations.ravel(), tails.ravel())


# Indices of the random streams, all different.
_TEST_ID, _TEST_OOD, _TRAIN, _SCORED, _VALIDATION_ID, _VALIDATION_OOD = range(6)
# Held-out sets of chains: of graph A (id), and of B (ood).
HELD_OUT = ("validation_id", "validation_ood", "test_id", "test_ood")
# Names of groups: which hops were seen in the same position in training.
_ROLES_OF_TWO = ("both", "first", "second", "none")
_ROLES = ("all", "some", "none")


def num_chains(num_entities: int, out_degree: int, hops: int) -> int:
  """Number of chains of one graph: E D^k (50,000 in section 3.1)."""
  return num_entities * out_degree**hops


def follow(
  graph: Graph, side: int, indices: np.ndarray, hops: int
) -> np.ndarray:
  """The facts of each chain.

  Args:
    graph: both graphs.
    side: 0 for chains of A, 1 for B.
    indices: the chains, int [N], below `num_chains`.
    hops: k.

  Returns:
    Numbers of facts, int64 [N, k]; the tail of each is the head of the next.
  """
  degree = graph.out_degree
  entities = side * graph.num_entities + indices // degree**hops
  facts = []
  for hop in range(1, hops + 1):
    edges = indices // degree ** (hops - hop) % degree
    facts.append(entities * degree + edges)
    entities = graph.tails[facts[-1]]
  return np.stack(facts, axis=1)


def make_splits(
  graph: Graph, num_train: Sequence[int], num_test: Sequence[int], seed: int
) -> dict[str, np.ndarray]:
  """All splits, drawn uniformly.

  The test chains do not depend on the number of training chains.

  Args:
    graph: both graphs.
    num_train: training chains of A with 2, 3, ... hops.
    num_test: chains of each held-out set with 2, 3, ... hops.
    seed: seed of the split.

  Returns:
    int64 [N, k] facts by name: "train_atom", every single fact of both graphs;
    "train_2" (A), "validation_id_2" and "test_id_2" (A), "validation_ood_2"
    and "test_ood_2" (B), all disjoint, and so on for every k. Empty splits are
    omitted.
  """
  train = {"train_atom": np.arange(graph.num_facts)[:, None]}
  held_out: dict[str, dict[int, np.ndarray]] = {name: {} for name in HELD_OUT}
  for hops, (n_train, n_test) in enumerate(
    zip(num_train, num_test, strict=True), start=2
  ):
    total = num_chains(graph.num_entities, graph.out_degree, hops)
    sets = {}
    for kind, streams in (
      ("id", (_TEST_ID, _VALIDATION_ID)),
      ("ood", (_TEST_OOD, _VALIDATION_OOD)),
    ):
      test = _draw(_rng(streams[0], seed, hops), n_test, total)
      chosen = _draw(_rng(streams[1], seed, hops), n_test, total, test)
      sets[f"test_{kind}"], sets[f"validation_{kind}"] = test, chosen
    seen = np.union1d(sets["test_id"], sets["validation_id"])
    trained = _draw(_rng(_TRAIN, seed, hops), n_train, total, seen)
    train[f"train_{hops}"] = follow(graph, 0, trained, hops)
    for name in HELD_OUT:
      side = int(name.endswith("ood"))
      held_out[name][hops] = follow(graph, side, sets[name], hops)
  splits = train | {
    f"{name}_{hops}": facts
    for name, parts in held_out.items()
    for hops, facts in parts.items()
  }
  return {name: facts for name, facts in splits.items() if len(facts)}


def scored(
  splits: Mapping[str, np.ndarray], held_out: str, num_train: int, seed: int
) -> dict[str, np.ndarray]:
  """The chains that evaluation scores: held-out ones, and a training sample.

  Args:
    splits: from `make_splits`.
    held_out: "validation", or "test" for both test and validation chains, which
      allows selecting reported runs by validation.
    num_train: maximum chains per training split, drawn by the seed; 0 for all.
    seed: seed of the split.
  """
  chosen = {
    name: facts
    for name, facts in splits.items()
    if held_out == "test" or not name.startswith("test_")
  }
  for name, facts in splits.items():
    if name.startswith("train_") and 0 < num_train < len(facts):
      rng = _rng(_SCORED, seed, facts.shape[1])
      chosen[name] = facts[_draw(rng, num_train, len(facts))]
  return chosen


def seen_roles(
  graph: Graph, splits: Mapping[str, np.ndarray], max_hops: int
) -> np.ndarray:
  """Which facts were composed in training, and in which positions.

  Ignores single facts, which are not composed.

  Returns:
    bool [max_hops, facts]: row j - 1 marks the facts that are hop j of any
    training chain, of any length.
  """
  seen = np.zeros((max_hops, graph.num_facts), bool)
  for name, facts in splits.items():
    if name.startswith("train_") and name != "train_atom":
      for hop, facts_of_hop in enumerate(facts.T):
        seen[hop, facts_of_hop] = True
  return seen


def role_exposure(
  facts: np.ndarray, seen: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray]:
  """How many facts of each chain were seen in their positions.

  Args:
    facts: chains of k >= 2 hops, int [N, k].
    seen: from `seen_roles`.

  Returns:
    Names of the groups, and ids int [N]. For two hops: "both", "first",
    "second" or "none" were seen in their positions; for more: "all", "some" or
    "none".
  """
  hops = facts.shape[1]
  missing = ~seen[np.arange(hops)[:, None], facts.T]
  if hops == 2:
    return _ROLES_OF_TWO, 2 * missing[0] + missing[1]
  return _ROLES, 1 * missing.any(axis=0) + missing.all(axis=0)


def digest(graph: Graph, splits: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of both graphs and of every split, hexadecimal."""
  sha = hashlib.sha256()
  arrays = {"relations": graph.relations, "tails": graph.tails, **splits}
  for name, array in arrays.items():
    sha.update(f"{name} {array.shape}".encode())
    sha.update(array.astype("<i8").tobytes())
  return sha.hexdigest()


def _rng(stream: int, seed: int, hops: int) -> np.random.Generator:
  return np.random.default_rng((stream, seed, hops))


def _draw(
  rng: np.random.Generator,
  num: int,
  total: int,
  taken: np.ndarray = np.empty(0, np.int64),
) -> np.ndarray:
  """Distinct integers below `total`, ascending, none in `taken`."""
  ranks = np.sort(rng.choice(total - len(taken), num, replace=False))
  # The free integer of rank r is r plus the number of smaller taken ones.
  free_before = taken - np.arange(len(taken))
  return ranks + np.searchsorted(free_before, ranks, side="right")
