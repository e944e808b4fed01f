"""Figures of the effects of edits between loops: interventions, patches."""

import pathlib
from collections.abc import Sequence
from typing import Any

from loopjax.analysis.multihop import edits, figures, interventions, rows
from loopjax.analysis.plots import draw

_COLORS = {"train": draw.BLUE, "test_id": draw.GREEN, "test_ood": draw.RED}
_DASHES = ("-", "--", ":", "-.")
_MARKERS = {"train": "o", "test_id": "s", "test_ood": "^"}
_TARGETS = {
  "argmax": "most likely token",
  "bridge": "true bridge",
  "random_entity": "random entity (control)",
}
_NORMS = {
  "rms": "RMS norm",
  "match_hidden": "length of H",
  "final_norm": "trained norm",
}


def _style(split: str) -> dict[str, Any]:
  """Colour by kind of split, dashes by hops, for names such as "test_id_2"."""
  kind, _, hops = split.rpartition("_")
  return {
    "color": _COLORS[kind],
    "marker": _MARKERS[kind],
    "linestyle": _DASHES[(int(hops) - 2) % len(_DASHES)],
    "markersize": 4,
  }


def draw_interventions(
  found: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """intervention_loop<k>.png: accuracy by alpha (figure 2, right)."""
  sweep = rows.select(found, "intervention")
  return [
    _draw_loop(rows.select(sweep, "intervention", loop=loop), loop, directory)
    for loop in rows.values_of(sweep, "loop")
  ]


def _draw_loop(
  sweep: Sequence[rows.Row], loop: int, directory: pathlib.Path
) -> pathlib.Path:
  """Targets in columns, norms in rows, one line per split."""
  num_rows, num_columns = len(edits.NORMS), len(interventions.TARGETS)
  figure = draw.new(3.6 * num_columns, 2.6 * num_rows + 0.9)
  grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True)
  for panels, kind in zip(grid, edits.NORMS, strict=True):
    for axes, target in zip(panels, interventions.TARGETS, strict=True):
      cells = rows.select(sweep, "intervention", norm=kind, target=target)
      for split in rows.values_of(cells, "split"):
        line = rows.select(cells, "intervention", split=split)
        axes.errorbar(
          [row["alpha"] for row in line],
          [row["accuracy"] for row in line],
          [row["accuracy/standard_error"] for row in line],
          label=split,
          **_style(split),
        )
      title = f"{_TARGETS[target]}, {_NORMS[kind]}"
      below = r"$\alpha$" if kind == edits.NORMS[-1] else ""
      left = "accuracy" if target == interventions.TARGETS[0] else ""
      draw.tidy(axes, title, below, left)
      axes.set_ylim(-0.03, 1.03)
  figures.legend_below(figure, grid[0, 0])
  figure.suptitle(
    f"After loop {loop}, at {_where(sweep)}:"
    r" $H \leftarrow (1 - \alpha) H + \alpha\,$Norm(W[token])"
  )
  return draw.save(figure, directory / f"intervention_loop{loop}.png")


def _where(found: Sequence[rows.Row]) -> str:
  """The position of the rows as text; it may vary with more than two hops."""
  positions = rows.values_of(found, "position")
  if len(positions) > 1:
    return "the bridge's position"
  return f"position {positions[0]}"


def draw_patching(
  found: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """patching.png: how often the answer becomes the implied one or stays."""
  patched = rows.select(found, "patching")
  loops = rows.values_of(patched, "loop")
  if not loops:
    return []
  width = max(4.4, 0.5 + 0.85 * len(rows.values_of(patched, "split")))
  figure, panels = figures.panel_grid(2 * len(loops), width, 3.2, num_columns=2)
  for index, axes in enumerate(panels):
    loop, place = loops[index // 2], ("patched", "control")[index % 2]
    shown = rows.select(patched, "patching", loop=loop, place=place)
    groups = [f"{row['split']}\nn={row['count']}" for row in shown]
    bars = {"changes to the implied answer": (draw.BLUE, shown, "implied")}
    bars["is unchanged"] = (draw.ORANGE, shown, "stays")
    figures.draw_bars(axes, groups, bars)
    axes.set_ylim(0, 1.03)
    title = f"After loop {loop}, {_where(shown)}"
    title += " (control)" if place == "control" else ""
    draw.tidy(axes, title, "", "share")
  figures.legend_below(figure, panels[0])
  figure.suptitle("Answers after patching in another question's state")
  return [draw.save(figure, directory / "patching.png")]
