"""Interventions without training: another token's embedding, or state.

DiscoLoop, arXiv 2607.00341, equation 3 and figure 2: between two loops, at one
position, H <- (1 - alpha) H + alpha Norm(W[b]). For DiscoLoop itself, H is the
output of the channel, H~, and b is decoded from the channel's input.

Causal patching: does the state at the bridge's position carry the bridge? The
state after a loop at this position is replaced by the state for another
question (the donor) of the same split. If later loops take the bridge from that
position, the answer becomes the entity to which the question's remaining
relations lead from the donor's bridge.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from loopjax.analysis.multihop import instrumented, rows
from loopjax.analysis.multihop.instrumented import InstrumentedModel, Observed
from loopjax.analysis.multihop.questions import Questions
from loopjax.data.multihop import chains

ALPHAS = tuple(step / 10 for step in range(11))
# b: the most likely token as in the paper, the true entity after k hops for
# loop k, or, as a control, an entity that the question does not involve.
TARGETS = ("argmax", "bridge", "random_entity")


class Place(NamedTuple):
  """The loop, questions and positions of an edit.

  Attributes:
    loop: the loop after which to edit, from 1.
    rows: indices of the questions with a bridge there: the entity after `loop`
      hops is not yet the answer, int [n].
    position: the position to edit in each question, int [n].
  """

  loop: int
  rows: np.ndarray
  position: np.ndarray


def places(
  questions: Questions,
  num_loops: int,
  loop: int | None = None,
  position: int | None = None,
) -> Iterator[Place]:
  """Bridge k at its position after loop k, for all k < K with such questions.

  Args:
    num_loops: K.
    loop: only this k; None for all.
    position: the position for all bridges; None for the first position that
      sees everything on which the bridge depends.
  """
  for k in range(1, num_loops) if loop is None else (loop,):
    members = np.flatnonzero(questions.hops > k)
    if position is not None:
      members = members[questions.last[members] >= position]
    where = questions.hop_positions[members, k - 1] if len(members) else members
    if position is not None:
      where = np.full_like(where, position)
    if len(members):
      yield Place(k, members, where)


def sweep(
  model: InstrumentedModel,
  questions: Questions,
  observed: Observed,
  place: Place,
) -> list[rows.Row]:
  """Accuracy by split, target, norm and alpha."""
  members, loop, position = place.rows, place.loop, place.position
  inputs, last = questions.inputs[members], questions.last[members]
  states = model.passed_on(inputs, loop, position)
  targets = {
    "argmax": observed.prediction[members, loop - 1, position],
    "bridge": questions.entities[members, loop],
    "random_entity": questions.random_entity[members],
  }
  assert tuple(targets) == TARGETS
  results = []
  for target, tokens in targets.items():
    for kind in instrumented.NORMS:
      vectors = model.embed(tokens, states, kind)
      for alpha in ALPHAS:
        answers = model.answer(inputs, last, loop, position, alpha, vectors)
        right = answers == questions.answers[members]
        for split, _, inside in questions.by_split():
          chosen = np.isin(members, inside)
          if chosen.any():
            results.append(
              rows.make(
                "intervention",
                split,
                loop,
                int(position[chosen][0]),
                {"accuracy": right[chosen]},
                target=target,
                norm=kind,
                alpha=alpha,
              )
            )
  return results


_MAX_CANDIDATES = 64


class Pairs(NamedTuple):
  """Questions with their donors.

  Attributes:
    donor: index of each question's donor, int [n]; -1 if none was found.
    implied: entity that the patched question leads to, int [n]; -1 if no donor.
    examined: number of pairs examined.
    qualified: number of usable pairs.
  """

  donor: np.ndarray
  implied: np.ndarray
  examined: int
  qualified: int


def fact_table(graph: chains.Graph, num_relations: int) -> np.ndarray:
  """Tail entity by head and relation, int [2 E, relations]; -1 for no fact."""
  table = np.full((2 * graph.num_entities, num_relations), -1)
  table[graph.heads, graph.relations] = graph.tails
  return table


def follow(
  table: np.ndarray, entities: np.ndarray, relations: np.ndarray
) -> np.ndarray:
  """Follows relations [n, m] from entities [n], one after another.

  Returns:
    int [n]; -1 where a fact is missing.
  """
  for step in relations.T:
    entities = np.where(entities < 0, -1, table[entities, step])
  return entities


def make_pairs(
  table: np.ndarray,
  bridges: np.ndarray,
  relations: np.ndarray,
  answers: np.ndarray,
  rng: np.random.Generator,
) -> Pairs:
  """Draws a donor for each of n questions.

  A pair qualifies if facts lead from the donor's bridge along the question's
  relations to an entity other than the question's answer, which distinguishes
  "becomes" from "stays". Up to 64 donors are tried.

  Args:
    table: from `fact_table`.
    bridges, answers: of every question, int [n].
    relations: the relations after the bridge, int [n, m].
  """
  num = len(bridges)
  order = rng.permutation(num)
  donor, implied, qualified = np.full(num, -1), np.full(num, -1), 0
  shifts = range(1, min(_MAX_CANDIDATES + 1, num))
  for shift in shifts:
    candidate = np.empty(num, int)
    candidate[order] = np.roll(order, -shift)
    leads_to = follow(table, bridges[candidate], relations)
    fits = (leads_to >= 0) & (leads_to != answers)
    new = fits & (donor < 0)
    donor[new], implied[new] = candidate[new], leads_to[new]
    qualified += int(fits.sum())
  return Pairs(donor, implied, num * len(shifts), qualified)


def patch(
  model: InstrumentedModel,
  questions: Questions,
  observed: Observed,
  place: Place,
  table: np.ndarray,
  num_entities: int,
) -> tuple[list[rows.Row], list[str]]:
  """How often the patched answer becomes the implied one, by split.

  Rows have the place "patched" and, with the same donors at position 0,
  "control". "implied" is the fraction of answers that are the implied entity,
  "stays" the fraction that the patch does not change; "examined" is the number
  of pairs examined and "qualified" the usable fraction of them.

  Args:
    table: from `fact_table`.
    num_entities: number of entities of both graphs; ids of relations follow.

  Returns:
    (rows, a line for every split without a usable pair).
  """
  results, notes = [], []
  for split, hops, inside in questions.by_split():
    chosen = np.isin(place.rows, inside)
    members, position = place.rows[chosen], place.position[chosen]
    if not len(members):
      continue
    pairs = make_pairs(
      table,
      questions.entities[members, place.loop],
      questions.relations[members, place.loop : hops] - num_entities,
      questions.answers[members],
      np.random.default_rng(0),
    )
    used = np.flatnonzero(pairs.donor >= 0)
    if not len(used):
      notes.append(
        f"patching of {split} after loop {place.loop} is skipped: none of "
        f"{pairs.examined} pairs leads along existing facts to another answer"
      )
      continue
    for name, where in (("patched", position), ("control", 0 * position)):
      answers = patched_answers(
        model, questions, members, pairs.donor, place.loop, where
      )
      before = observed.prediction[members, -1, questions.last[members]]
      samples = {
        "implied": (answers == pairs.implied)[used],
        "stays": (answers == before)[used],
      }
      results.append(
        {
          **rows.make(
            "patching", split, place.loop, int(where[0]), samples, place=name
          ),
          "examined": pairs.examined,
          "qualified": pairs.qualified / pairs.examined,
        }
      )
  return results, notes


def patched_answers(
  model: InstrumentedModel,
  questions: Questions,
  members: np.ndarray,
  donor: np.ndarray,
  loop: int,
  position: np.ndarray,
) -> np.ndarray:
  """Answers with the donor's state at one position after one loop, int [n].

  Args:
    members: rows of the questions to patch, int [n].
    donor: index into `members` of each question's donor, int [n]; -1 for the
      question itself.
    loop: the loop after which to patch, from 1.
    position: the position to patch in each question and its donor, int [n].
  """
  inputs, last = questions.inputs[members], questions.last[members]
  states = model.passed_on(inputs, loop, position)
  source = np.where(donor < 0, np.arange(len(donor)), donor)
  return model.answer(inputs, last, loop, position, 1.0, states[source])
