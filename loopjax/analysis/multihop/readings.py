"""Readings of the unedited model: stages, role exposure, lens and cosines."""

import numpy as np

from loopjax.analysis.multihop import instrumented, rows
from loopjax.analysis.multihop.questions import Questions, entity_name


def stages(
  questions: Questions, observed: instrumented.Observed
) -> list[rows.Row]:
  """Accuracy after every loop by split (DiscoLoop, table 1a)."""
  return [
    row
    for split, _, members in questions.by_split()
    for row in _stages("stage", split, members, questions, observed)
  ]


def role_exposure(
  questions: Questions, observed: instrumented.Observed
) -> list[rows.Row]:
  """Accuracy after every loop by role exposure, see `chains.role_exposure`."""
  results = []
  for group, name in enumerate(questions.role_exposure_names):
    members = np.flatnonzero(questions.role_exposure == group)
    split, _, label = name.partition("/")
    if len(members):
      results += _stages(
        "role_exposure",
        split,
        members,
        questions,
        observed,
        role_exposure=label,
      )
  return results


def _stages(
  analysis: str,
  split: str,
  members: np.ndarray,
  questions: Questions,
  observed: instrumented.Observed,
  **labels: str,
) -> list[rows.Row]:
  """One row per loop."""
  last = questions.last[members]
  prediction = observed.prediction[members, :, last]  # [n, K]
  right = prediction == questions.answers[members][:, None]
  return [
    rows.make(
      analysis, split, loop, int(last[0]), {"accuracy": sample}, **labels
    )
    for loop, sample in enumerate(right.T, start=1)
  ]


def first_loops(is_argmax: np.ndarray) -> np.ndarray:
  """Marks the first loop, along axis 1, at which a token is the argmax."""
  return is_argmax & (np.cumsum(is_argmax, axis=1) == 1)


def logit_lens(
  questions: Questions, observed: instrumented.Observed
) -> list[rows.Row]:
  """Logit lens of every bridge and the answer, by loop and position (table 1b).

  "hop_position" is the first position that sees everything on which the entity
  depends: position 1 for the first bridge in the paper's symbolic format.
  Besides the metrics of `instrumented.read_out`, "argmax" is the fraction of
  questions for which the entity is the most likely token after this loop, and
  "first_argmax" the fraction for which it is so for the first time.
  """
  is_argmax = observed.lens["rank"] == 1
  samples = {
    **observed.lens,
    "argmax": is_argmax,
    "first_argmax": first_loops(is_argmax),
  }
  results = []
  for split, hops, members in questions.by_split():
    for hop in range(1, hops + 1):
      part = {key: v[members, ..., hop - 1] for key, v in samples.items()}
      results += _grid("lens", split, members, questions, part, hop=hop)
  return results


def cosines(
  questions: Questions, observed: instrumented.Observed
) -> list[rows.Row]:
  """Cosines of every bridge, the answer and controls, by loop and position.

  The controls are "start" a, "relation1", ... and "random_entity", an entity
  that the question does not involve. No channel follows the last loop: its rows
  have no "mixed" cosines.
  """
  results = []
  compared = instrumented.tokens_compared(questions)
  for split, _, members in questions.by_split():
    for index, (name, ids) in enumerate(compared.items()):
      if ids[members[0]] < 0:
        continue
      part = {
        key: v[members, ..., index] for key, v in observed.cosines.items()
      }
      # The entities after each hop come first.
      hop = index + 1 if index < questions.num_hops else None
      results += _grid(
        "cosine", split, members, questions, part, hop=hop, entity=name
      )
  return results


def _grid(
  analysis: str,
  split: str,
  members: np.ndarray,
  questions: Questions,
  samples: dict[str, np.ndarray],
  *,
  hop: int | None,
  entity: str = "",
) -> list[rows.Row]:
  """One row per loop and position of a question.

  Args:
    members: indices into `questions`, int [n].
    samples: values by metric, [n, K, T].
    hop: the entity after this hop; None for a control.
    entity: name of the control.
  """
  labels: dict[str, str | int] = {"entity": entity}
  if hop is not None:
    first = members[0]
    labels = {
      "entity": entity_name(hop, int(questions.hops[first])),
      "hop_position": int(questions.hop_positions[first, hop - 1]),
    }
  num_loops = next(iter(samples.values())).shape[1]
  return [
    rows.make(
      analysis,
      split,
      loop + 1,
      position,
      {
        name: value[:, loop, position]
        for name, value in samples.items()
        if loop + 1 < num_loops or not name.startswith("mixed_")
      },
      **labels,
    )
    for loop in range(num_loops)
    for position in range(int(questions.last[members[0]]) + 1)
  ]
