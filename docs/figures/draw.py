"""Draws the pictures of the pages about families from tables of results.

python docs/figures/draw.py
"""

import io
import json
import pathlib
import re

import numpy as np
from matplotlib import patches
from PIL import Image

from loopjax.analysis.plots import draw
from loopjax.play import load

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"
RUNS = HERE.parent.parent / "benchmarks" / "runs"


def table(file: str, first: str) -> list[list[str]]:
  """The rows of the table on a page of results whose header begins so."""
  text = (RESULTS / file).read_text(encoding="utf-8")
  (found,) = re.findall(rf"(?m)^{re.escape(first)}.*\n((?:\|.*\n)+)", text)
  rows = [line.strip("|\n").split("|") for line in found.splitlines()[1:]]
  return [[cell.strip() for cell in row] for row in rows]


def curves(name: str, title: str, steps: range, lines: list[tuple]) -> None:
  """Draws scores over steps: (label, values) of each run."""
  figure = draw.new(6.4, 3.6)
  axes = figure.subplots()
  draw.tidy(axes, title, "optimizer steps", "")
  labels = list(dict.fromkeys(label for label, _ in lines))
  for label, values in lines:
    place = labels.index(label)
    known = axes.get_legend_handles_labels()[1]
    axes.plot(
      steps,
      values,
      color=draw.PALETTE[place],
      linestyle="--" if place else "-",
      marker="o",
      ms=3,
      label=None if label in known else label,
    )
  axes.set_ylim(0, 1)
  axes.legend(frameon=False, fontsize=9)
  draw.save(figure, HERE / f"{name}.png")


def more_loops(name: str, file: str) -> None:
  """Draws the share of puzzles not solved after each loop, a line per run.

  On a log scale: most of the gain is beyond 90 % solved.
  """
  figure = draw.new(6.4, 2.9)
  axes = figure.subplots()
  kept = json.loads((RUNS / file).read_text(encoding="utf-8"))["items"]
  for place, run in enumerate(kept):
    metrics, trained = run["summary"]["metrics"], run["config"]["model"]
    loops = np.arange(1, 3 * trained["num_loops"] + 1)
    solved = [metrics[f"depth/exact_match/loop={k - 1}"] for k in loops]
    label = f"seed {run['overrides']['run.seed']}"
    left = 100 * (1 - np.array(solved))
    axes.plot(loops, left, color=draw.PALETTE[place], label=label)
  axes.axvline(trained["num_loops"], color=draw.GREY, linestyle=":")
  axes.text(
    trained["num_loops"] + 0.4, 60, "loops in training", color=draw.GREY
  )
  axes.set_yscale("log")
  axes.set_ylim(0.3, 120)
  axes.set_yticks([1, 10, 100], ["1", "10", "100"])
  axes.set_xticks(range(0, len(loops) + 1, 6))
  draw.tidy(axes, "6x6 Sudoku: test puzzles not solved, by loops", "loops", "%")
  axes.legend(frameon=False, fontsize=9, loc="center right")
  draw.save(figure, HERE / f"{name}.png")


def more_starts(name: str, file: str) -> None:
  """Draws the share of puzzles solved, over seconds and by kind of start."""
  rows = np.array(table(file, "| starts | seconds, 16 loops"), float)
  figure = draw.new(9.6, 3.2)
  axes, right = figure.subplots(1, 2, width_ratios=(3, 2))
  for place, (label, seconds, solved) in enumerate(
    (
      ("test, 24 loops", 3, 4),
      ("test, 16 loops", 1, 2),
      ("public hard puzzles, 24 loops", 3, 5),
    )
  ):
    axes.plot(
      rows[:, seconds],
      rows[:, solved],
      color=draw.PALETTE[place],
      marker="o",
      ms=3,
      label=label,
    )
  for row in rows[::2]:
    axes.annotate(
      f"{row[0]:.0f}", (row[3], row[4]), (0, 5), textcoords="offset points",
      ha="center", fontsize=8, color=draw.PALETTE[0],
    )  # fmt: skip
  (plain,) = table(file, "| 1,024 test puzzles")[2:3]
  axes.axhline(
    float(plain[1].split()[0]),
    color=draw.GREY,
    linestyle=":",
    label="test, one start without noise, 64 loops",
  )
  axes.set_xscale("log")
  axes.set_xticks([0.003, 0.01, 0.03, 0.1], ["0.003", "0.01", "0.03", "0.1"])
  axes.set_ylim(0, 1.05)
  draw.tidy(
    axes,
    "9x9 Sudoku, solved by 1 to 64 starts",
    "seconds of one core per puzzle",
    "",
  )
  axes.legend(frameon=False, fontsize=9, loc="lower right")
  for place, row in enumerate(table(file, "| 512 test puzzles")):
    solved = [float(cell.split()[0].strip("*")) for cell in row[1:8]]
    color = draw.PALETTE[place]
    right.plot(2 ** np.arange(7), solved, color=color, marker="o", ms=3)
    right.annotate(
      row[0], (64, solved[-1]), (-4, (6, -14, 16)[place]), ha="right",
      textcoords="offset points", fontsize=8, color=color,
    )  # fmt: skip
  right.set_xscale("log", base=2)
  right.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
  right.set_ylim(0.4, 1.1)
  draw.tidy(right, "512 of the test puzzles: noise, or views?", "starts", "")
  draw.save(figure, HERE / f"{name}.png")


def peers(name: str) -> None:
  """Draws what families solve after equal time of training, a dot per seed."""
  hard = {
    "all": "", "17 clues": "/source=puzzles2_17_clue",
    "diabolical": "/source=grantm_diabolical",
    "a forum's\nhardest": "/source=puzzles5_forum_hardest_1905_11+",
  }  # fmt: skip
  ours = {
    "all": "", "no guess": "/rating=0", "1-2": "/rating=1-2",
    "3-9": "/rating=3-9", "10-29": "/rating=10-29",
  }  # fmt: skip
  figure = draw.new(9.0, 3.2)
  both = figure.subplots(1, 2, width_ratios=(len(hard), len(ours)))
  for axes, files, kinds, title in (
    (both[0], ["sudoku_hard_peers"], hard, "public hard puzzles, by source"),
    (both[1], ["sudoku_nine_memory", "sudoku_nine_urm"], ours,
     "packaged puzzles, by guesses needed"),
  ):  # fmt: skip
    texts = [
      (RUNS / f"{file}.runs.json").read_text(encoding="utf-8") for file in files
    ]
    runs = [run for text in texts for run in json.loads(text)["items"]]
    for place, family in enumerate(("utm", "urm", "trm")):
      scores = [
        run["summary"]["metrics"]
        for run in runs
        # The sweep on memory tokens also has models without any.
        if run["config"]["model"]["name"] == family
        and (family != "utm" or run["config"]["model"]["num_memory_tokens"])
      ]
      points = [
        (x + 0.2 * (place - 1), score[f"test/exact_match{kind}"])
        for score in scores
        for x, kind in enumerate(kinds.values())
      ]
      if points:
        axes.plot(
          *np.transpose(points),
          color=draw.PALETTE[place],
          marker="os^"[place],
          linestyle="",
          alpha=0.8,
          label=family.upper(),
        )
    draw.tidy(axes, f"9x9 Sudoku: {title}", "", "solved")
    axes.set_xticks(range(len(kinds)), list(kinds))
    axes.set_ylim(-0.02, None)
    axes.legend(frameon=False, fontsize=9)
  draw.save(figure, HERE / f"{name}.png")


def passes_label(number: int) -> str:
  """The label of models with this many passes."""
  return f"{number} pass{'es' * (number > 1)}"


def equal_time(name: str, files: tuple[str, ...]) -> None:
  """Draws Rule 110 over the passes that were trained, a line for each run."""
  figure = draw.new(6.4, 3.2)
  axes = figure.subplots()
  for place, (file, passes) in enumerate(zip(files, (4, 1), strict=True)):
    label = passes_label(passes)
    for run in json.loads((RUNS / file).read_text(encoding="utf-8"))["items"]:
      loops = run["summary"]["metrics"]["test/loops_run"]
      if (run["config"]["task"]["num_steps"], loops) != (5, passes):
        continue
      scored = [e for e in run["evaluations"] if e["split"] == "validation"]
      known = axes.get_legend_handles_labels()[1]
      axes.plot(
        [row["step"] * passes for row in scored],
        [row["exact_match"] for row in scored],
        color=draw.PALETTE[place],
        linestyle="--" if place else "-",
        label=None if label in known else label,
      )
  axes.set_ylim(0, 1.02)
  draw.tidy(
    axes,
    "Rule 110, five steps: both labels right, validation, three seeds",
    "optimizer steps x passes",
    "",
  )
  axes.legend(frameon=False, fontsize=9, loc="lower right")
  draw.save(figure, HERE / f"{name}.png")


def cache_bytes(name: str, file: str, num_tokens: int) -> None:
  """Draws the test's bits per byte over bytes of cache, a point per seed."""
  figure = draw.new(6.4, 3.6)
  axes = figure.subplots()
  rows = table(file, "| cache | bytes per token")[1:]  # Not the start.
  for place, (label, per_token, other, _, test, *_) in enumerate(rows):
    slope, constant = (float(x.replace(",", "")) for x in (per_token, other))
    size = (num_tokens * slope + constant) / 1e6
    values = [float(x) for x in test.split(",")]
    axes.plot(
      [size] * len(values),
      values,
      color=draw.PALETTE[place],
      marker="o",
      linestyle="",
      alpha=0.8,
      label=label,
    )
  axes.set_xlim(0, None)
  draw.tidy(
    axes,
    "Caches of one loop: novels, test, three seeds",
    f"MB of cache for a row of {num_tokens} tokens",
    "bits per byte",
  )
  axes.legend(frameon=False, fontsize=9)
  draw.save(figure, HERE / f"{name}.png")


def board(name: str, entry: str) -> None:
  """Draws a hard puzzle loop by loop, as a picture that moves."""
  inspector = load.load(pathlib.Path(f"zoo:{entry}"), num_loops=24)
  found, size = inspector.random(0, "hard"), inspector.facts["boxRows"] ** 2
  given = [c != "." for c in found["prompt"]]
  digits = [
    [int(c) if c != "." else 0 for c in found["prompt"]],
    *found["digits"],
  ]
  certain = [[0] * size**2, *found["certain"]]
  frames = []
  for loop, (said, sure) in enumerate(zip(digits[:-1], certain, strict=False)):
    figure = draw.new(3.4, 3.7)
    axes = figure.subplots()
    axes.set(
      xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[]
    )
    title = f"loop {loop} of {len(digits) - 2}" if loop else "puzzle"
    axes.set_title(title, fontsize=10)
    for cell, digit in enumerate(said):
      row, column = divmod(cell, size)
      right = digit == int(found["solution"][cell])
      shade = "#d9d9d9" if given[cell] else "#2a9d5c" if right else "#d1495b"
      alpha = 1.0 if given[cell] else 0.75 * sure[cell] / 100
      axes.add_patch(
        patches.Rectangle((column, row), 1, 1, color=shade, alpha=alpha, lw=0)
      )
      if digit > 0 and not right and not given[cell]:  # Not by colour alone.
        axes.plot(
          [column + 0.36, column + 0.64], [row + 0.82] * 2,
          color="#1c1e21", lw=1.2,
        )  # fmt: skip
      if digit > 0:
        weight = "bold" if given[cell] else "normal"
        axes.text(
          column + 0.5, row + 0.53, digit, ha="center", va="center",
          weight=weight, fontsize=11,
        )  # fmt: skip
    for line in range(size + 1):
      width = 1.6 if line % inspector.facts["boxRows"] == 0 else 0.4
      axes.plot([0, size], [line, line], color="#1c1e21", lw=width)
      axes.plot([line, line], [0, size], color="#1c1e21", lw=width)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=180)
    frames.append(Image.open(picture).convert("RGB").quantize(48))
  times = [1200, *[350] * (len(frames) - 2), 3000]
  path = HERE / f"{name}.gif"
  frames[0].save(
    path, save_all=True, append_images=frames[1:], duration=times, loop=0
  )


def main() -> None:
  """Draws all."""
  board("sudoku_nine", "sudoku_nine")
  more_loops("more_loops", "sudoku_six.runs.json")
  more_starts("more_starts", "2026-11-28_cpu_2cores_more_starts.md")
  equal_time(
    "sleep_equal_time",
    ("rule_110_steps.runs.json", "rule_110_equal_time.runs.json"),
  )
  peers("peers")
  cache_bytes("cache_bytes", "2026-11-28_cpu_2cores_melt_caches.md", 128)
  rows = table("2026-11-28_cpu_2cores_sleep.md", "| seed | N | step 200 | 400")
  curves(
    "sleep_passes",
    "Depo: answers of two hops, validation, three seeds",
    range(200, 1201, 200),
    [(passes_label(int(row[1])), [float(x) for x in row[2:8]]) for row in rows],
  )
  rows = table(
    "2026-11-28_cpu_2cores_two_hops.md", "| | seed | OOD at step 2,000 | 4,000"
  )
  curves(
    "disco_composition",
    "Chains of facts that were never composed: accuracy, three seeds",
    range(2000, 10_001, 2000),
    [(row[0], [float(x) for x in row[2:7]]) for row in rows],
  )


if __name__ == "__main__":
  main()
