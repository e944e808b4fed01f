"""Two graphs with the properties of section 2 of the paper."""

import numpy as np
import pytest

from loopjax.data.multihop import chains

SIZES = [(500, 50, 10), (7, 4, 4), (1, 1, 1)]


def make(sizes, seed=0):
  return chains.make_graph(*sizes, np.random.default_rng(seed))


@pytest.mark.parametrize("sizes", SIZES)
def test_every_entity_has_its_facts_of_distinct_relations(sizes):
  num_entities, num_relations, out_degree = sizes
  graph = make(sizes)
  assert graph.num_facts == 2 * num_entities * out_degree
  by_head: dict[int, list[int]] = {}
  for head, relation in zip(graph.heads, graph.relations, strict=True):
    by_head.setdefault(int(head), []).append(int(relation))
  assert sorted(by_head) == list(range(2 * num_entities))
  for relations in by_head.values():
    assert len(set(relations)) == len(relations) == out_degree
    assert relations == sorted(relations)
    assert set(relations) <= set(range(num_relations))


@pytest.mark.parametrize("sizes", SIZES)
def test_no_fact_leads_from_one_graph_to_the_other(sizes):
  graph = make(sizes)
  assert set(np.unique(graph.tails)) <= set(range(2 * sizes[0]))
  in_b = graph.heads >= sizes[0]
  np.testing.assert_array_equal(in_b, graph.tails >= sizes[0])
  assert in_b.sum() == graph.num_facts // 2


def test_relations_and_tails_are_uniform():
  graph = make((2000, 20, 5))
  for values, num in ((graph.relations, 20), (graph.tails, 4000)):
    counts = np.bincount(values, minlength=num)
    expected = graph.num_facts / num
    chi_square = np.sum((counts - expected) ** 2 / expected)
    # Relations of one entity exclude each other, which lowers their variance.
    assert chi_square < num + 6 * (2 * num) ** 0.5


def test_the_graphs_differ_from_each_other_and_by_the_seed():
  graph, other = make((50, 20, 5)), make((50, 20, 5), seed=1)
  half = graph.num_facts // 2
  assert not np.array_equal(graph.relations[:half], graph.relations[half:])
  assert not np.array_equal(graph.tails[:half], graph.tails[half:] - 50)
  assert not np.array_equal(graph.relations, other.relations)
  assert not np.array_equal(graph.tails, other.tails)
