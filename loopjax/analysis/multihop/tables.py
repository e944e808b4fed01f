"""The rows of an analysis as text tables for the terminal."""

import textwrap
from collections.abc import Iterable, Sequence

from loopjax.analysis.multihop import instrumented, interventions, rows
from loopjax.commands import document

# The cosines of a row, and of what: H is the state after a loop.
STATES = {
  "cosine": "H",
  "centred_cosine": "H, centred",
  "mixed_cosine": "what is passed on",
  "mixed_centred_cosine": "the same, centred",
}


def stages(results: Sequence[rows.Row]) -> str:
  """Accuracy after every loop (DiscoLoop, table 1a)."""
  return _by_loop(
    "Accuracy after each loop, % ± standard error",
    rows.select(results, "stage"),
    ("split",),
  )


def role_exposure(results: Sequence[rows.Row]) -> str:
  """Accuracy after every loop by role exposure, see `chains.role_exposure`."""
  return _by_loop(
    "The same, by which facts were composed in their positions in training",
    rows.select(results, "role_exposure"),
    ("split", "role_exposure"),
  )


def _by_loop(title: str, results: Sequence[rows.Row], labels) -> str:
  loops = rows.values_of(results, "loop")
  lines = [
    [
      *group,
      str(cells[0]["count"]),
      *(_percent(row, "accuracy") for row in cells),
    ]
    for group, cells in _grouped(results, labels)
  ]
  return _table(title, [*labels, "n", *(f"loop {k}" for k in loops)], lines)


def _grouped(results: Iterable[rows.Row], labels: Sequence[str]):
  """(values of these labels, the rows that have them), in order."""
  groups: dict[tuple, list[rows.Row]] = {}
  for row in results:
    groups.setdefault(tuple(row[x] for x in labels), []).append(row)
  return groups.items()


def logit_lens(results: Sequence[rows.Row]) -> str:
  """Bridge k after loop k, at its position and at its maximum (table 1b)."""
  lens = rows.select(results, "lens")
  lines = []
  for split, entity, loop in _bridges(lens):
    cells = rows.select(lens, "lens", split=split, entity=entity, loop=loop)
    for mark, row in _fixed_and_best(cells, "probability"):
      over_loops = rows.select(
        lens, "lens", split=split, entity=entity, position=row["position"]
      )
      shares = [each["first_argmax"] for each in over_loops]
      lines.append(
        [
          *(split, entity, str(loop), f"{row['position']} {mark}"),
          _plus_minus(row, "probability"),
          f"{row['rank']:.1f}",
          f"{row['reciprocal_rank']:.3f}",
          f"{row['margin']:.2f}",
          f"{row['entropy']:.3f}",
          " ".join(f"{k}: {100 * s:.0f}" for k, s in enumerate(shares, 1))
          + f" never: {100 * max(1 - sum(shares), 0):.0f}",
        ]
      )
  header = ["split", "entity", "loop", "position", "probability", "rank"]
  header += ["1/rank", "margin", "entropy", "first argmax, % by loop"]
  return _table(
    "Logit lens on bridge k after loop k (hop: where it is first known;"
    " best: where it is clearest)",
    header,
    lines,
  )


def cosines(results: Sequence[rows.Row]) -> str:
  """Bridge k after loop k beside its controls (table 1b)."""
  cosine = rows.select(results, "cosine")
  lines = []
  for split, entity, loop in _bridges(cosine):
    cells = rows.select(cosine, "cosine", split=split, entity=entity, loop=loop)
    for metric in (name for name in STATES if name in cells[0]):
      for mark, row in _fixed_and_best(cells, metric):
        cell = {"split": split, "loop": loop, "position": row["position"]}
        controls = [
          rows.select(cosine, "cosine", entity=name, **cell)[0]
          for name in controls_of(entity)
        ]
        lines.append(
          [
            *(split, entity, str(loop), metric, f"{row['position']} {mark}"),
            *(_plus_minus(each, metric) for each in (row, *controls)),
          ]
        )
  header = ["split", "entity", "loop", "metric", "position", "W[entity]"]
  return _table(
    "Cosines of bridge k after loop k, and of controls at the same position",
    [*header, "W[a]", "W[r]", "W[random entity]"],
    lines,
  )


def controls_of(bridge: str) -> tuple[str, ...]:
  """The controls of a bridge: a, its relation, a random entity."""
  hop = bridge.removeprefix("bridge")
  return "start", f"relation{hop}", "random_entity"


def intervention(results: Sequence[rows.Row]) -> str:
  """Accuracy by alpha (figure 2, right)."""
  sweep = rows.select(results, "intervention")
  alphas = rows.values_of(sweep, "alpha")
  labels = ("target", "norm", "split", "loop", "position")
  lines = [
    [*map(str, group), *(f"{100 * row['accuracy']:.1f}" for row in cells)]
    for group, cells in _grouped(sweep, labels)
  ]
  order = [(t, n) for t in interventions.TARGETS for n in instrumented.NORMS]
  lines.sort(key=lambda line: order.index((line[0], line[1])))
  header = ["target", "norm", "split", "after", "at"]
  return _table(
    "Intervention H <- (1 - alpha) H + alpha Norm(W[target]): accuracy, %",
    [*header, *(f"{alpha:.1f}" for alpha in alphas)],
    lines,
  )


def patching(results: Sequence[rows.Row]) -> str:
  """How often the donor's bridge determines the answer."""
  lines = [
    [
      row["split"],
      str(row["loop"]),
      f"{row['position']} ({row['place']})",
      str(row["count"]),
      _percent(row, "implied"),
      _percent(row, "stays"),
      f"{row['examined']}",
      f"{100 * row['qualified']:.1f}",
    ]
    for row in rows.select(results, "patching")
  ]
  header = ["split", "after", "at", "n", "implied, %", "stays, %"]
  return _table(
    "State replaced by another question's: the answer changes to the implied "
    "one or is unchanged",
    [*header, "pairs examined", "qualified, %"],
    lines,
  )


def _bridges(results: Iterable[rows.Row]) -> list[tuple[str, str, int]]:
  """(split, bridge, k) of every bridge k that has a loop k."""
  return list(
    dict.fromkeys(
      (row["split"], row["entity"], row["loop"])
      for row in results
      if row["entity"] == f"bridge{row['loop']}"
    )
  )


def _fixed_and_best(cells: Sequence[rows.Row], metric: str):
  """The row at the hop's position, and the one with the highest mean."""
  fixed = next(row for row in cells if row["position"] == row["hop_position"])
  best = max(cells, key=lambda row: row[metric])
  if best is fixed:
    return [("hop, best", fixed)]
  return [("hop", fixed), ("best", best)]


def _percent(row: rows.Row, name: str) -> str:
  return _with_error(row, name, 100, 1)


def _plus_minus(row: rows.Row, name: str) -> str:
  return _with_error(row, name, 1, 3)


def _with_error(row: rows.Row, name: str, factor: float, digits: int) -> str:
  """A mean and its standard error; a single question has none."""
  found = [row.get(x) for x in (name, f"{name}/standard_error")]
  known = [f"{factor * x:.{digits}f}" for x in found if x is not None]
  return " ± ".join(known)


def _table(title: str, header: Sequence[str], lines) -> str:
  """Aligned columns under a title; "" if there are no lines."""
  if not lines:
    return ""
  table = document.aligned([list(header), *lines])
  return f"{title}\n{textwrap.indent(table, '  ')}"
