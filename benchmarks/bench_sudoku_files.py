"""Time and memory needed for a file of millions of puzzles.

python benchmarks/bench_sudoku_files.py --folder=DIR [--rows=3831994]

Writes files of the size of Sudoku-Extreme (symmetric variants of packaged 9x9
puzzles; plain training file, gzip test file), and loads them as training does,
in separate processes: a first start, a second start, and one that continues for
a tenth of an epoch (which touches the whole file).
"""

import argparse
import contextlib
import gzip
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from loopjax.data import pipeline
from loopjax.data.sudoku import puzzles, symmetry, task

ROWS, TEST_ROWS = 3_831_994, 422_786  # As in Sudoku-Extreme.
_CHUNK = 20_000
_PARTS = ("first start", "second start", "a tenth of an epoch")


def make(path: pathlib.Path, num: int, split: str) -> None:
  """Writes a file of `num` different puzzles."""
  board = task.Config().board
  packed = puzzles.load_bank(board)
  in_test = symmetry.place(packed.class_keys) < task.TEST_SHARE
  chosen = np.flatnonzero(in_test == (split == "test"))
  boards = puzzles.unpack(board, packed.givens[chosen], packed.answers[chosen])
  opened = gzip.open if path.suffix == ".gz" else open
  with opened(path, "wt") as file:
    file.write("source,question,answer,rating\n")
    for start in range(0, num, _CHUNK):
      positions = np.arange(start, min(start + _CHUNK, num))
      rows = positions % len(chosen)
      numbers = pipeline.uniforms(0, positions, symmetry.num_uniforms(board))
      change = symmetry.from_uniforms(board, numbers)
      texts = [
        (symmetry.apply(change, cells[rows]) + ord("0")).tobytes().decode()
        for cells in boards
      ]
      ratings = packed.ratings[chosen[rows]].tolist()
      for i, rating in enumerate(ratings):
        question, answer = (text[81 * i : 81 * (i + 1)] for text in texts)
        file.write(
          f"bank{i % 5},{question.replace('0', '.')},{answer},{rating}\n"
        )


def measure(train: pathlib.Path, test: pathlib.Path, part: str) -> None:
  """Starts as training does; prints time and memory as JSON."""
  config = task.Config(
    train_csv=str(train), test_csv=str(test), on_overlap="error", augment=True
  )
  before, started = _peak(), time.perf_counter()
  with contextlib.redirect_stdout(sys.stderr):
    datasets = {
      split: task.make_dataset(config, split, batch_size=768, seed=0)
      for split in ("train", "validation", "test")
    }
  report = {
    "part": part,
    "seconds": round(time.perf_counter() - started, 1),
    "facts": {n: d.facts for n, d in datasets.items()},
  }
  if part == _PARTS[-1]:
    num = datasets["train"].facts["train_examples"] // 768 // 10
    started = time.perf_counter()
    for index in range(num):
      datasets["train"].batches[index]
    seconds = time.perf_counter() - started
    report["examples_per_second"] = round(768 * num / seconds)
  report["peak_mib"] = {"imports": before, "all": _peak()}
  print(json.dumps(report))


def _peak() -> int:
  """Peak memory of this process so far, in MiB."""
  status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
  return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--rows", type=int, default=ROWS)
  parser.add_argument("--part", choices=_PARTS, help="One process of it.")
  arguments = parser.parse_args()
  train, test = (
    arguments.folder / name for name in ("train.csv", "test.csv.gz")
  )
  if arguments.part:
    measure(train, test, arguments.part)
    return
  arguments.folder.mkdir(parents=True, exist_ok=True)
  num_test = round(arguments.rows * TEST_ROWS / ROWS)
  for path, num, split in (
    (train, arguments.rows, "train"),
    (test, num_test, "test"),
  ):
    if not path.exists():
      make(path, num, split)
  for part in _PARTS:
    subprocess.run(
      [sys.executable, __file__, f"--folder={arguments.folder}"]
      + [f"--part={part}"],
      env=os.environ | {"XDG_CACHE_HOME": str(arguments.folder / "cache")},
      check=True,
    )


if __name__ == "__main__":
  main()
