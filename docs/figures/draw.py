"""Draws the pictures of the pages about families from tables of results.

python docs/figures/draw.py
"""

import pathlib
import re

from loopjax.analysis.plots import draw

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results"


def table(file: str, first: str) -> list[list[str]]:
  """The rows of the table on a page of results whose header begins so."""
  text = (RESULTS / file).read_text()
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


def main() -> None:
  """Draws all."""
  rows = table(
    "2026-11-22_cpu_2cores_fresh_seeds.md", "| seed | N | step 200 | 400"
  )
  curves(
    "sleep_passes",
    "Depo: answers of two hops, validation, three seeds",
    range(200, 1201, 200),
    [(f"N = {row[1]}", [float(x) for x in row[2:8]]) for row in rows],
  )
  rows = table(
    "2026-11-21_cpu_2cores_multihop.md", "| | seed | OOD at step 2,000 | 4,000"
  )
  curves(
    "disco_composition",
    "Chains of facts that were never composed: accuracy, three seeds",
    range(2000, 10_001, 2000),
    [(row[0], [float(x) for x in row[2:7]]) for row in rows],
  )


if __name__ == "__main__":
  main()
