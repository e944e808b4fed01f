"""Figures of the unedited model (stages, lens, cosines and role exposure), and
of the effects of edits between loops (interventions, patches).
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import image as image_lib
from matplotlib import ticker

from loopjax.analysis.multihop import instrumented, interventions, rows, tables
from loopjax.analysis.plots import draw, series

_ROOM = 0.7  # Inches for a title and a legend of all panels.
_MARKERS = "os^Dv<>"
_DASHES = ("-", "--", ":", "-.")  # Keeps overlapping lines visible.


def draw_stages(
  metrics: list[rows.Row],
  splits: Sequence[str],
  num_loops: int,
  directory: pathlib.Path,
) -> list[pathlib.Path]:
  """stages.png: accuracy after every loop over training (figure 3).

  None if metrics.jsonl has no such accuracies yet.
  """
  shown = [
    split
    for split in splits
    if len(series.scalar(metrics, split, "stage1_accuracy")[0])
  ]
  if not shown:
    return []
  figure, panels = draw.grid(len(shown), min(len(shown), 4), 3.6, 2.9, _ROOM)
  for axes, split in zip(panels, shown, strict=True):
    for loop in range(num_loops):
      steps, values = series.scalar(metrics, split, f"stage{loop + 1}_accuracy")
      axes.plot(
        steps,
        values,
        label=f"after loop {loop + 1}",
        color=draw.color(loop),
        linestyle=_DASHES[loop % len(_DASHES)],
        marker=_MARKERS[loop % len(_MARKERS)],
        markersize=4,
      )
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    draw.tidy(axes, split, "optimizer steps", "accuracy")
  legend_below(figure, panels[0])
  figure.suptitle("Accuracy after each loop, over training")
  return [draw.save(figure, directory / "stages.png")]


def draw_lens(
  results: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """lens.png: probability of every entity by loop, position and split."""
  lens = [
    row
    for row in rows.select(results, "lens")
    if not row["split"].endswith("_atom")
  ]
  if not lens:
    return []
  by_split = {
    split: {
      entity: rows.select(lens, "lens", split=split, entity=entity)
      for entity in rows.values_of(
        rows.select(lens, "lens", split=split), "entity"
      )
    }
    for split in rows.values_of(lens, "split")
  }
  num_columns = max(map(len, by_split.values()))
  width = 1.1 + 0.4 * (1 + max(row["position"] for row in lens))
  height = 1.2 + 0.4 * max(row["loop"] for row in lens)
  figure = draw.new(
    max(width, 3.0) * num_columns + 0.9, height * len(by_split) + 0.5
  )
  grid = figure.subplots(len(by_split), num_columns, squeeze=False)
  for panels, (split, entities) in zip(grid, by_split.items(), strict=True):
    for axes in panels[len(entities) :]:
      axes.set_visible(False)
    for axes, (entity, cells) in zip(panels, entities.items(), strict=False):
      image = _draw_map(axes, cells)
      axes.set_title(f"{split}, {entity}", fontsize=10, loc="left")
  figure.colorbar(
    image, ax=list(grid.ravel()), label="mean probability", shrink=0.8
  )
  figure.suptitle(
    "Logit lens; framed: first position where the entity is known", fontsize=12
  )
  return [draw.save(figure, directory / "lens.png")]


def _draw_map(
  axes: axes_lib.Axes, cells: Sequence[rows.Row]
) -> image_lib.AxesImage:
  """A heat map of loops by positions, with the numbers in the cells."""
  num_loops = max(row["loop"] for row in cells)
  values = np.array([row["probability"] for row in cells])
  values = values.reshape(num_loops, -1)  # Rows come by loop, then position.
  image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
  for (loop, position), value in np.ndenumerate(values):
    axes.text(
      position,
      loop,
      f"{value:.2f}".removeprefix("0"),
      color="black" if value > 0.6 else "white",
      fontsize=8,
      ha="center",
      va="center",
    )
  at = cells[0]["hop_position"]
  axes.axvspan(
    at - 0.48, at + 0.48, fill=False, edgecolor=draw.RED, linewidth=2.5
  )
  axes.set_xticks(range(values.shape[1]))
  axes.set_yticks(range(num_loops), [str(k + 1) for k in range(num_loops)])
  axes.set_xlabel("position", fontsize=9)
  axes.set_ylabel("after loop", fontsize=9)
  return image


def draw_cosines(
  results: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """cosines.png: bridge k after loop k at its position, and controls."""
  cosine = rows.select(results, "cosine")
  ours = [
    row
    for row in cosine
    if row["entity"] == f"bridge{row['loop']}"
    and row["position"] == row["hop_position"]
  ]
  if not ours:
    return []
  metrics = [n for n in tables.STATES if any(n in row for row in ours)]
  bridges = rows.values_of(ours, "entity")
  num_splits = len(rows.values_of(ours, "split"))
  figure = draw.new(
    max(3.4, 1.3 + 0.8 * num_splits) * len(metrics), 3.1 * len(bridges) + 0.9
  )
  grid = figure.subplots(len(bridges), len(metrics), squeeze=False, sharey=True)
  colors = (draw.BLUE, draw.ORANGE, draw.PURPLE, draw.GREY)
  names = ("the bridge", "a", "the relation", "a random entity")
  for panels, bridge in zip(grid, bridges, strict=True):
    shown = [row for row in ours if row["entity"] == bridge]
    tokens = (bridge, *tables.controls_of(bridge))
    for axes, metric in zip(panels, metrics, strict=True):
      if metric not in shown[0]:  # The last loop has no next loop.
        axes.set_visible(False)
        continue
      bars = {
        name: (color, _at_same_place(cosine, shown, token), metric)
        for name, color, token in zip(names, colors, tokens, strict=True)
      }
      draw_bars(axes, [row["split"] for row in shown], bars)
      axes.axhline(0, color="0.3", linewidth=0.8)
      title = f"{bridge}, loop {shown[0]['loop']}: {tables.STATES[metric]}"
      draw.tidy(axes, title, "", "cosine")
  legend_below(figure, grid[0, 0])
  figure.suptitle("Cosine of the state with embeddings, ± standard error")
  return [draw.save(figure, directory / "cosines.png")]


def _at_same_place(
  cosine: Sequence[rows.Row], places: Sequence[rows.Row], entity: str
) -> list[rows.Row]:
  """Rows of another token, one per row of `places`."""
  return [
    rows.select(
      cosine,
      "cosine",
      entity=entity,
      **{name: row[name] for name in ("split", "loop", "position")},
    )[0]
    for row in places
  ]


def draw_role_exposure(
  results: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """role_exposure.png: accuracy by the facts composed in their positions."""
  role_exposure = rows.select(results, "role_exposure")
  if not role_exposure:
    return []
  last = max(row["loop"] for row in role_exposure)
  splits = rows.values_of(role_exposure, "split")
  across = min(len(splits), 3)
  figure, panels = draw.grid(len(splits), across, 4.4, 3.2, _ROOM)
  for axes, split in zip(panels, splits, strict=True):
    shown = rows.select(role_exposure, "role_exposure", split=split, loop=last)
    groups = [f"{row['role_exposure']}\nn={row['count']}" for row in shown]
    draw_bars(axes, groups, {"": (draw.GREEN, shown, "accuracy")})
    axes.set_ylim(0, 1.03)
    draw.tidy(axes, split, "facts seen in this position", "accuracy")
  figure.suptitle(f"Accuracy after loop {last} by role exposure")
  return [draw.save(figure, directory / "role_exposure.png")]


def draw_bars(
  axes: axes_lib.Axes,
  groups: Sequence[str],
  bars: Mapping[str, tuple[str, Sequence[rows.Row], str]],
) -> None:
  """Groups of bars with standard errors.

  `groups` are their names under the axis; `bars` has a colour, a row per group
  and the metric to show, by name of the bar.
  """
  width = 0.8 / len(bars)
  for index, (name, (color, shown, metric)) in enumerate(bars.items()):
    offset = (index - (len(bars) - 1) / 2) * width
    axes.bar(
      np.arange(len(groups)) + offset,
      [row[metric] for row in shown],
      width,
      yerr=[row.get(f"{metric}/standard_error", np.nan) for row in shown],
      color=color,
      ecolor="0.2",
      capsize=2,
      label=name,
    )
  axes.set_xticks(range(len(groups)), groups, fontsize=8)


def legend_below(figure: figure_lib.Figure, axes: axes_lib.Axes) -> None:
  """One legend for all panels, from the entries of one."""
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(len(labels), 6),
    frameon=False,
    fontsize=9,
  )


_COLORS = {"train": draw.BLUE, "test_id": draw.GREEN, "test_ood": draw.RED}
_EFFECT_MARKERS = {"train": "o", "test_id": "s", "test_ood": "^"}
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
    "marker": _EFFECT_MARKERS[kind],
    "linestyle": _DASHES[(int(hops) - 2) % len(_DASHES)],
    "markersize": 4,
  }


def draw_interventions(
  results: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """intervention_loop<k>.png: accuracy by alpha (figure 2, right)."""
  sweep = rows.select(results, "intervention")
  return [
    _draw_loop(rows.select(sweep, "intervention", loop=loop), loop, directory)
    for loop in rows.values_of(sweep, "loop")
  ]


def _draw_loop(
  sweep: Sequence[rows.Row], loop: int, directory: pathlib.Path
) -> pathlib.Path:
  """Targets in columns, norms in rows, one line per split."""
  num_rows, num_columns = len(instrumented.NORMS), len(interventions.TARGETS)
  figure = draw.new(3.6 * num_columns, 2.6 * num_rows + 0.9)
  grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True)
  for panels, kind in zip(grid, instrumented.NORMS, strict=True):
    for axes, target in zip(panels, interventions.TARGETS, strict=True):
      cells = rows.select(sweep, "intervention", norm=kind, target=target)
      for split in rows.values_of(cells, "split"):
        line = rows.select(cells, "intervention", split=split)
        axes.errorbar(
          [row["alpha"] for row in line],
          [row["accuracy"] for row in line],
          [row.get("accuracy/standard_error", np.nan) for row in line],
          label=split,
          **_style(split),
        )
      title = f"{_TARGETS[target]}, {_NORMS[kind]}"
      below = r"$\alpha$" if kind == instrumented.NORMS[-1] else ""
      left = "accuracy" if target == interventions.TARGETS[0] else ""
      draw.tidy(axes, title, below, left)
      axes.set_ylim(-0.03, 1.03)
  legend_below(figure, grid[0, 0])
  figure.suptitle(
    f"After loop {loop}, at {_where(sweep)}:"
    r" $H \leftarrow (1 - \alpha) H + \alpha\,$Norm(W[token])"
  )
  return draw.save(figure, directory / f"intervention_loop{loop}.png")


def _where(results: Sequence[rows.Row]) -> str:
  """The position of the rows as text; it may vary with more than two hops."""
  positions = rows.values_of(results, "position")
  if len(positions) > 1:
    return "the bridge's position"
  return f"position {positions[0]}"


def draw_patching(
  results: Sequence[rows.Row], directory: pathlib.Path
) -> list[pathlib.Path]:
  """patching.png: how often the answer becomes the implied one or stays."""
  patched = rows.select(results, "patching")
  loops = rows.values_of(patched, "loop")
  if not loops:
    return []
  width = max(4.4, 0.5 + 0.85 * len(rows.values_of(patched, "split")))
  figure, panels = draw.grid(2 * len(loops), 2, width, 3.2, _ROOM)
  for index, axes in enumerate(panels):
    loop, place = loops[index // 2], ("patched", "control")[index % 2]
    shown = rows.select(patched, "patching", loop=loop, place=place)
    groups = [f"{row['split']}\nn={row['count']}" for row in shown]
    bars = {"changes to the implied answer": (draw.BLUE, shown, "implied")}
    bars["is unchanged"] = (draw.ORANGE, shown, "stays")
    draw_bars(axes, groups, bars)
    axes.set_ylim(0, 1.03)
    title = f"After loop {loop}, {_where(shown)}"
    title += " (control)" if place == "control" else ""
    draw.tidy(axes, title, "", "share")
  legend_below(figure, panels[0])
  figure.suptitle("Answers after patching in another question's state")
  return [draw.save(figure, directory / "patching.png")]
