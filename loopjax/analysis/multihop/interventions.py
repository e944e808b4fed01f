"""The training-free intervention: pass on the embedding of a token.

DiscoLoop, arXiv 2607.00341, equation 3 and figure 2: between two loops, at one
position, H <- (1 - alpha) H + alpha Norm(W[b]). For DiscoLoop itself, H is the
output of the channel, H~, and b is decoded from the channel's input.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from loopjax.analysis.multihop import edits, rows
from loopjax.analysis.multihop.instrumented import InstrumentedModel, Observed
from loopjax.analysis.multihop.questions import Questions

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
    questions: all questions.
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
  """Accuracy by split, target, norm and alpha.

  Args:
    model: the model.
    questions: all questions.
    observed: the model's outputs on them.
    place: the loop, questions and positions of the intervention.
  """
  members, loop, position = place.rows, place.loop, place.position
  inputs, last = questions.inputs[members], questions.last[members]
  states = model.passed_on(inputs, loop, position)
  targets = {
    "argmax": observed.prediction[members, loop - 1, position],
    "bridge": questions.entities[members, loop],
    "random_entity": questions.random_entity[members],
  }
  assert tuple(targets) == TARGETS
  found = []
  for target, tokens in targets.items():
    for kind in edits.NORMS:
      vectors = model.embed(tokens, states, kind)
      for alpha in ALPHAS:
        answers = model.answer(inputs, last, loop, position, alpha, vectors)
        right = answers == questions.answers[members]
        for split, _, inside in questions.by_split():
          chosen = np.isin(members, inside)
          if chosen.any():
            found.append(
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
  return found
