"""A control of the onset of loops: the same statistic on shuffled loops.

  python benchmarks/onset_control.py benchmarks/runs/onset.runs.json

Prints for each layer how many runs begin to loop and at which loss, and the
same for their loop counts in random order, with unchanged losses.
"""

import argparse
import json
import pathlib

import numpy as np

from loopjax.analysis import onset


def main() -> None:
  """Prints two lines per layer, for the runs and for the control."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("runs", type=pathlib.Path, help="NAME.runs.json")
  parser.add_argument("--draws", type=int, default=2000, help="orders of a run")
  options = parser.parse_args()
  items = json.loads(options.runs.read_text(encoding="utf-8"))["items"]
  rng = np.random.default_rng(0)
  ours = np.array([onset.losses(item["evaluations"]) for item in items])
  chance = np.array(
    [onset.shuffled(item["evaluations"], options.draws, rng) for item in items]
  )  # [runs, draws, layers]
  for layer, mine in enumerate(ours.T):
    drawn = chance[:, :, layer]
    print(f"layer {layer + 1}: {_described(mine)}")
    print(f"  in orders by chance: {_described(drawn.ravel())}")
    if np.isnan(mine).any():
      continue
    spreads = np.std(drawn, axis=0, ddof=1)
    whole = ~np.isnan(spreads)  # Draws in which every run begins.
    share = (spreads[whole] <= np.std(mine, ddof=1)).mean()
    print(
      f"  all begin in {whole.mean():.3f} of the draws; of these as near to"
    )
    print(f"  each other as ours: {share:.4f}")


def _described(losses: np.ndarray) -> str:
  begins = losses[~np.isnan(losses)]
  text = f"{len(begins)} of {len(losses)} begin"
  if len(begins) > 1:
    spread = begins.std(ddof=1)
    text += f", at {begins.mean():.2f} +- {spread:.2f} nats"
  return text


if __name__ == "__main__":
  main()
