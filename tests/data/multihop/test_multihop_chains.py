"""Graphs as in section 2 of the paper; chains, splits and roles in them."""

import itertools
import tracemalloc

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


SMALL = chains.make_graph(6, 5, 3, np.random.default_rng(3))
PAPER = chains.make_graph(500, 50, 10, np.random.default_rng(0))


def all_chains(graph, side, hops):
  """Every chain of one graph, found by walking along edges."""
  facts = list(
    zip(
      graph.heads.tolist(),
      graph.relations.tolist(),
      graph.tails.tolist(),
      strict=True,
    )
  )
  entities = range(side * graph.num_entities, (side + 1) * graph.num_entities)
  walks = [((), entity) for entity in entities]
  for _ in range(hops):
    walks = [
      ((*walk, fact), facts[fact][2])
      for walk, entity in walks
      for fact in range(len(facts))
      if facts[fact][0] == entity
    ]
  return {walk for walk, _ in walks}


def as_set(facts):
  result = {tuple(chain) for chain in facts.tolist()}
  assert len(result) == len(facts)  # No chain twice.
  return result


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("hops", [1, 2, 3])
def test_every_number_is_another_chain(side, hops):
  total = chains.num_chains(6, 3, hops)
  got = as_set(chains.follow(SMALL, side, np.arange(total), hops))
  assert got == all_chains(SMALL, side, hops)


@pytest.mark.parametrize("hops", [2, 3, 6])
def test_long_chains_hang_together(hops):
  total = chains.num_chains(500, 10, hops)
  indices = np.random.default_rng(0).integers(total, size=1000)
  facts = chains.follow(PAPER, 1, indices, hops)
  assert (PAPER.heads[facts] >= 500).all()
  np.testing.assert_array_equal(
    PAPER.tails[facts[:, :-1]], PAPER.heads[facts[:, 1:]]
  )


def test_the_papers_two_hop_splits():
  splits = chains.make_splits(PAPER, (10_000,), (2_000,), 0)
  sizes = {name: facts.shape for name, facts in splits.items()}
  assert sizes == {
    "train_atom": (10_000, 1), "train_2": (10_000, 2),
    "validation_id_2": (2_000, 2), "validation_ood_2": (2_000, 2),
    "test_id_2": (2_000, 2), "test_ood_2": (2_000, 2),
  }  # fmt: skip
  assert as_set(splits["train_atom"]) == {(fact,) for fact in range(10_000)}
  chains_of_two = [as_set(f) for n, f in splits.items() if n != "train_atom"]
  for one, other in itertools.combinations(chains_of_two, 2):
    assert one.isdisjoint(other)
  for name, facts in splits.items():
    if name != "train_atom":
      in_b = PAPER.heads[facts] >= 500
      assert (in_b == name.endswith("_ood_2")).all()


def test_the_papers_three_hop_splits():
  splits = chains.make_splits(PAPER, (5_000, 5_000), (1_000, 1_000), 0)
  sizes = {name: facts.shape for name, facts in splits.items()}
  assert sizes == {
    "train_atom": (10_000, 1), "train_2": (5_000, 2), "train_3": (5_000, 3),
    "validation_id_2": (1_000, 2), "validation_id_3": (1_000, 3),
    "validation_ood_2": (1_000, 2), "validation_ood_3": (1_000, 3),
    "test_id_2": (1_000, 2), "test_id_3": (1_000, 3), "test_ood_2": (1_000, 2),
    "test_ood_3": (1_000, 3),
  }  # fmt: skip
  assert as_set(splits["train_3"]).isdisjoint(as_set(splits["test_id_3"]))


def test_training_and_test_can_share_out_all_chains():
  """54 chains of two hops and 162 of three; nothing is lost or doubled."""
  splits = chains.make_splits(SMALL, (26, 38), (14, 62), 0)
  for hops in (2, 3):
    names = ("train", "validation_id", "test_id")
    parts = [as_set(splits[f"{name}_{hops}"]) for name in names]
    assert set.union(*parts) == all_chains(SMALL, 0, hops)
    assert sum(map(len, parts)) == len(all_chains(SMALL, 0, hops))


def test_hops_that_are_only_tested():
  splits = chains.make_splits(SMALL, (5, 0), (5, 5), 0)
  assert "train_3" not in splits
  assert len(splits["test_ood_3"]) == 5


def test_more_training_chains_leave_the_tests_alone():
  few, many = (
    chains.make_splits(PAPER, (num,), (500,), 0) for num in (100, 20_000)
  )
  for name in (f"{name}_2" for name in chains.HELD_OUT):
    np.testing.assert_array_equal(few[name], many[name])


def test_drawing_is_uniform_over_what_is_not_taken():
  rng, taken = np.random.default_rng(0), np.array([0, 3, 4, 9])
  counts = np.zeros(10)
  for _ in range(6000):
    drawn = chains._draw(rng, 3, 10, taken)
    assert len(set(drawn.tolist())) == 3
    counts[drawn] += 1
  assert (counts[taken] == 0).all()
  free = np.delete(counts, taken)
  np.testing.assert_allclose(free, 3000, atol=5 * 39)  # 5 standard errors.


def test_deep_chains_are_drawn_without_listing_them():
  """5e10 chains of eight hops: memory is proportional to the draws."""
  tracemalloc.start()
  splits = chains.make_splits(PAPER, (2_000,) * 7, (500,) * 7, 0)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert len(as_set(splits["train_8"])) == 2_000
  assert as_set(splits["test_id_8"]).isdisjoint(as_set(splits["train_8"]))
  assert peak < 20e6


def test_roles_by_brute_force():
  graph = chains.make_graph(20, 8, 4, np.random.default_rng(1))
  splits = chains.make_splits(graph, (60, 40), (130, 200), 5)
  roles = {
    (hop, fact)
    for name in ("train_2", "train_3")
    for chain in splits[name].tolist()
    for hop, fact in enumerate(chain)
  }
  seen = chains.seen_roles(graph, splits, 3)
  names = {
    2: {(1, 1): "both", (1, 0): "first", (0, 1): "second", (0, 0): "none"},
    3: {(1, 1, 1): "all", (0, 0, 0): "none"},
  }
  for hops, side in itertools.product((2, 3), ("id", "ood")):
    facts = splits[f"test_{side}_{hops}"]
    groups, ids = chains.role_exposure(facts, seen)
    got = [groups[i] for i in ids]
    had = [
      tuple(int((hop, fact) in roles) for hop, fact in enumerate(chain))
      for chain in facts.tolist()
    ]
    assert got == [names[hops].get(flags, "some") for flags in had]
    assert set(got) == (set(groups) if side == "id" else {"none"})


def test_the_papers_sizes_leave_a_quarter_without_both_roles():
  shares = []
  for seed in range(4):
    graph = chains.make_graph(500, 50, 10, np.random.default_rng((1, seed)))
    splits = chains.make_splits(graph, (10_000,), (2_000,), seed)
    seen = chains.seen_roles(graph, splits, 2)
    names, ids = chains.role_exposure(splits["test_id_2"], seen)
    shares.append(np.mean(ids == names.index("both")))
  # A fact is the first hop of 10 chains. One is held out, each of the others is
  # in training with probability 1/5: 1 - 0.8^9 = 0.87, and about the same for
  # the second hop.
  np.testing.assert_allclose(shares, 0.75, atol=0.03)


def test_scoring_takes_what_is_held_out_and_some_of_training():
  splits = chains.make_splits(SMALL, (30,), (10,), 0)
  some = chains.scored(splits, "test", 7, 0)
  assert list(some) == list(splits)
  validation = chains.scored(splits, "validation", 7, 0)
  left_out = {"test_id_2", "test_ood_2"}
  assert list(validation) == [n for n in splits if n not in left_out]
  for name, facts in some.items():
    assert as_set(facts) <= as_set(splits[name])
    assert len(facts) == (7 if name.startswith("train_") else 10)
  for num in (0, 1000):
    every = chains.scored(splits, "test", num, 0)
    assert all(every[name] is facts for name, facts in splits.items())


def test_the_digest_sees_everything():
  splits = chains.make_splits(SMALL, (20,), (10,), 0)
  digests = [chains.digest(SMALL, splits)]
  for name in ("relations", "tails"):
    changed = getattr(SMALL, name).copy()
    changed[-1] += 1
    digests.append(chains.digest(SMALL._replace(**{name: changed}), splits))
  for name, facts in splits.items():
    changed = facts.copy()
    changed[-1, -1] += 1
    digests.append(chains.digest(SMALL, {**splits, name: changed}))
  digests.append(
    chains.digest(SMALL, chains.make_splits(SMALL, (20,), (10,), 1))
  )
  assert len(set(digests)) == len(digests) == 10
