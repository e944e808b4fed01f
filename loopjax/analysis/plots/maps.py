"""Figures of attention maps, and what each head attends to.

Maps are attention weights [..., S, S], queries by keys, memory tokens first,
every row summing to one. All results are linear in the maps, or ratios of
linear results: maps averaged over examples give the pooled numbers.

The paper also gives each head a role: "reader", "writer", "constraint". The
masses of its H1, a writer, and of H5, which is not a writer, agree to within
0.05. Therefore only masses are reported here, no roles. "s" is the sequence,
"m" the memory; "sm" means queries of the sequence, mass on memory.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import colors as colors_lib

from loopjax.analysis.evaluated import EvaluatedModel
from loopjax.analysis.plots import draw
from loopjax.run import workdir as workdir_lib
from loopjax.types import TaskSpec


def quadrants(maps: np.ndarray, num_memory: int) -> dict[str, np.ndarray]:
  """Attention mass by kind of query and key (UTM, table 6).

  Args:
    maps: f32 [..., S, S].
    num_memory: M.

  Returns:
    "sm", "ss", "mm", "ms": mean over queries of the mass on these keys, [...].
    sm + ss = 1 and mm + ms = 1; without memory ss = 1 and the others are 0.
  """
  to_memory = maps[..., :num_memory].sum(axis=-1)
  to_sequence = maps[..., num_memory:].sum(axis=-1)
  result = {
    "sm": to_memory[..., num_memory:].mean(axis=-1),
    "ss": to_sequence[..., num_memory:].mean(axis=-1),
  }
  if num_memory:
    result["mm"] = to_memory[..., :num_memory].mean(axis=-1)
    result["ms"] = to_sequence[..., :num_memory].mean(axis=-1)
  else:
    result["mm"] = result["ms"] = np.zeros_like(result["ss"])
  return result


def uniform_quadrants(num_tokens: int, num_memory: int) -> dict[str, float]:
  """`quadrants` of a head that attends uniformly to all S tokens.

  With few memory tokens nearly all mass is on the sequence by chance.
  """
  maps = np.full((num_tokens, num_tokens), 1 / num_tokens)
  return {k: float(v) for k, v in quadrants(maps, num_memory).items()}


def coordinate_shares(
  maps: np.ndarray, num_memory: int, coordinates: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
  """Fraction of the sequence's attention to itself that shares a coordinate.

  On a board the coordinates are row, column and box: a head that propagates a
  rule stands out. A token shares all coordinates with itself.

  Args:
    maps: f32 [..., S, S].
    num_memory: M.
    coordinates: coordinates of every position of the sequence, [T, A].

  Returns:
    (fraction of the ss mass on keys with the query's coordinate a, [..., A];
    the value for uniform attention over the sequence, [A]).
  """
  inside = maps[..., num_memory:, num_memory:]
  points = np.asarray(coordinates)
  same = points[:, None, :] == points[None, :, :]
  mass = np.einsum("...qk,qka->...a", inside, same.astype(inside.dtype))
  total = inside.sum(axis=(-2, -1))[..., None]
  # A head that attends only to memory has no mass to distribute.
  share = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
  return share, same.mean(axis=(0, 1))


def draw_attention(evaluated: EvaluatedModel) -> list[pathlib.Path]:
  """attention.png: head-averaged maps at three loops (UTM, figure 5)."""
  maps = evaluated.output.trace["attention"]  # [K, H, S, S]
  num_loops = len(maps)
  loops = sorted({0, num_loops // 2, num_loops - 1})
  panels = [maps[loop].mean(axis=0) for loop in loops]
  figure = draw.new(4.2 * len(panels) + 0.8, 4.5)
  grid = figure.subplots(1, len(panels), squeeze=False)[0]
  norm = _norm(np.stack(panels))
  for axes, loop, panel in zip(grid, loops, panels, strict=True):
    image = _draw_map(axes, panel, evaluated.num_memory, norm)
    axes.set_title(f"loop {loop + 1} of {num_loops}", fontsize=11)
    axes.set_xlabel("key")
  grid[0].set_ylabel("query")
  figure.colorbar(image, ax=list(grid), label="attention", shrink=0.85)
  figure.suptitle("Attention, mean over heads and examples", fontsize=12)
  return [draw.save(figure, evaluated.directory / "attention.png")]


def draw_heads(evaluated: EvaluatedModel) -> list[pathlib.Path]:
  """attention_heads.png and .json: each head at the last loop (figure 6)."""
  maps, spec = evaluated.output.trace["attention"], evaluated.spec
  num_memory, directory = evaluated.num_memory, evaluated.directory
  numbers = head_numbers(maps, num_memory, spec)
  last, num_heads = maps[-1], maps.shape[1]
  columns = min(4, num_heads)
  figure, grid = draw.grid(num_heads, columns, 3.1, 3.3)
  norm = _norm(last)
  for head, axes in enumerate(grid):
    image = _draw_map(axes, last[head], num_memory, norm)
    axes.set_title(_head_title(numbers, head), fontsize=10)
  figure.colorbar(image, ax=figure.axes, label="attention", shrink=0.85)
  figure.suptitle(
    f"Attention of each head at loop {len(maps)}, mean over examples",
    fontsize=12,
  )
  path = directory / "attention_heads.json"
  workdir_lib.write_json(path, numbers)
  return [draw.save(figure, directory / "attention_heads.png"), path]


def head_numbers(
  maps: np.ndarray, num_memory: int, spec: TaskSpec
) -> dict[str, Any]:
  """Quadrants and shares of each head, as JSON-ready data.

  Maps are f32 [K, H, S, S], averaged over examples. For each head, "last" and
  "same" are at the last loop, "mean" is over all loops; "uniform" is for a head
  that attends uniformly; "quadrants_by_loop" is [K][H] by name.
  """
  mass = quadrants(maps, num_memory)
  shares, uniform = coordinate_shares(maps, num_memory, spec.coordinates)

  def named(values):
    return {
      name: round(float(value), 4)
      for name, value in zip(spec.coordinate_names, values, strict=True)
    }

  def of_head(function, head):
    return {
      name: round(float(function(value[:, head])), 4)
      for name, value in mass.items()
    }

  return {
    "num_memory": num_memory,
    "num_loops": len(maps),
    "uniform": {
      "last": uniform_quadrants(maps.shape[-1], num_memory),
      "same": named(uniform),
    },
    "heads": [
      {
        "head": head,
        "last": of_head(lambda loops: loops[-1], head),
        "mean": of_head(np.mean, head),
        "same": named(shares[-1, head]),
      }
      for head in range(maps.shape[1])
    ],
    "quadrants_by_loop": {
      name: np.round(value.astype(float), 4).tolist()
      for name, value in mass.items()
    },
  }


def _norm(maps: np.ndarray) -> colors_lib.Normalize:
  """Square-root colours up to a high percentile, to show weak structure."""
  top = float(np.percentile(maps, 99.5))
  return colors_lib.PowerNorm(0.5, vmin=0.0, vmax=max(top, 1e-6))


def _draw_map(axes: axes_lib.Axes, panel, num_memory: int, norm):
  """Draws one map, with lines around its memory quadrants."""
  image = axes.imshow(panel, cmap="magma", norm=norm, interpolation="nearest")
  size = len(panel)
  middles, labels = [(num_memory + size - 1) / 2], ["sequence"]
  if num_memory:
    middles.insert(0, (num_memory - 1) / 2)
    labels.insert(0, "mem.")
    for line in (axes.axhline, axes.axvline):
      line(num_memory - 0.5, color="#4cc9f0", linewidth=1.2)
  axes.set_xticks(middles, labels, fontsize=8)
  axes.set_yticks(middles, labels, fontsize=8, rotation=90, va="center")
  axes.tick_params(length=0)
  return image


def _head_title(numbers: dict[str, Any], head: int) -> str:
  """Title: the mass on memory, and the coordinate farthest above chance."""
  same, uniform = numbers["heads"][head]["same"], numbers["uniform"]["same"]
  name = max(same, key=lambda name: same[name] / uniform[name])
  title = f"head {head}"
  if numbers["num_memory"]:
    title += f", s→m {numbers['heads'][head]['last']['sm']:.2f}"
  if same[name] > 1.5 * uniform[name]:
    title += f", same {name} {same[name]:.2f}"
  return title
