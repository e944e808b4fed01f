"""Where to intervene, and the effect on a known model."""

import multihop_examples as examples
import numpy as np
import pytest

from loopjax.analysis.multihop import instrumented, interventions, rows


def test_places_are_where_bridges_can_be_known():
  question_set = examples.make_questions()
  first, second = interventions.places(question_set, 3)
  assert (first.loop, second.loop) == (1, 2)
  assert sorted(set(question_set.hops[first.rows].tolist())) == [2, 3]
  assert set(question_set.hops[second.rows].tolist()) == {3}
  assert set(first.position.tolist()) == {1}
  assert set(second.position.tolist()) == {2}
  assert [place.loop for place in interventions.places(question_set, 2)] == [1]
  (chosen,) = interventions.places(question_set, 3, loop=2)
  assert np.array_equal(chosen.rows, second.rows)
  (moved,) = interventions.places(question_set, 3, loop=1, position=3)
  assert set(question_set.hops[moved.rows].tolist()) == {3}
  assert set(moved.position.tolist()) == {3}


@pytest.mark.long
def test_a_weak_bridge_is_helped_by_its_embedding():
  """Loops write strength 0.1, and later loops need at least 0.5.

  No second bridge is found, and its place contains the relation, at 1 - alpha.
  It competes with alpha times the bridge's component of Norm(W[b]): 3 by the
  "trained" norm of the example, 1 at the length of the hidden state.
  """
  question_set = examples.make_questions()
  model = examples.instrument(strength=0.1)
  observed = model.observe(question_set)
  (_, place) = interventions.places(question_set, 3)
  found = interventions.sweep(model, question_set, observed, place)
  splits = rows.values_of(found, "split")
  assert splits == ["train_3", "test_id_3", "test_ood_3"]
  size = examples.CONFIG.vocabulary.size
  entries = {"rms": ((1 + 0.05**2) / (2 * size)) ** -0.5, "final_norm": 3.0}
  table = examples.make_table()
  for row in found:
    alpha = row["alpha"]
    entry = alpha * entries.get(row["norm"], 1.0)
    reads = entry >= 0.5 and entry > 1 - alpha
    if entry == 1 - alpha:
      continue
    members = place.rows[
      question_set.split[place.rows] == question_set.splits.index(row["split"])
    ]
    relation = (
      question_set.relations[members, 2] - 2 * examples.CONFIG.num_entities
    )
    leads_to = table[question_set.random_entity[members], relation]
    shares = {
      "argmax": 0.0,  # The relation itself.
      "bridge": 1.0,
      "random_entity": np.mean(leads_to == question_set.answers[members]),
    }
    expected = reads * shares[row["target"]]
    assert row["accuracy"] == pytest.approx(expected), row
    assert (row["loop"], row["position"]) == (2, 2)
  assert len(found) == 3 * 3 * len(instrumented.NORMS) * len(
    interventions.ALPHAS
  )


@pytest.mark.long
def test_what_is_decoded_is_handed_on():
  """After loop 1 the argmax is the bridge: both targets agree."""
  question_set = examples.make_questions()
  model = examples.instrument(num_loops=2, strength=0.1)
  observed = model.observe(question_set)
  (place,) = interventions.places(question_set, 2)
  found = interventions.sweep(model, question_set, observed, place)
  for row in rows.select(found, "intervention", split="test_ood_2"):
    reached = row["alpha"] >= {"rms": 0.1, "final_norm": 0.2}.get(
      row["norm"], 2.0
    )
    if row["target"] != "random_entity":
      assert row["accuracy"] == reached, row


@pytest.mark.long
def test_targets_are_of_the_loop_and_position_that_are_edited():
  """The most likely token at this loop and position, not at others."""
  question_set = examples.make_questions()
  model = examples.instrument()
  observed = model.observe(question_set)
  tokens = np.arange(observed.prediction.size) % 24  # Neighbours differ.
  observed = observed._replace(
    prediction=tokens.reshape(observed.prediction.shape)
  )
  embedded = []

  def embed(tokens, states, kind):
    embedded.append((kind, tokens))
    return model.embed(tokens, states, kind)

  (place,) = interventions.places(question_set, 3, 2)
  interventions.sweep(
    model._replace(embed=embed), question_set, observed, place
  )
  expected = {
    "argmax": observed.prediction[place.rows, 1, 2],
    "bridge": question_set.entities[place.rows, 2],
    "random_entity": question_set.random_entity[place.rows],
  }
  wanted = [(k, t) for t in interventions.TARGETS for k in instrumented.NORMS]
  for (kind, target), (got_kind, got) in zip(wanted, embedded, strict=True):
    assert kind == got_kind
    assert np.array_equal(got, expected[target])
