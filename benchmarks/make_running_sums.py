"""Writes running sums: a training text, and held-out questions.

  python benchmarks/make_running_sums.py FOLDER [--num_terms=8]

writes FOLDER/train.jsonl, with one document per sum, such as

  3+4+8+2=7,15,17

with the partial sum after each term, and FOLDER/validation.jsonl and
FOLDER/test.jsonl, questions `3+4+8+2=` for `loopjax.eval.harness`, whose
answers are the last numbers. No question occurs in another file.
"""

import argparse
import json
import pathlib

import numpy as np

NUM_DOCUMENTS, NUM_QUESTIONS = 60_000, 200


def main() -> None:
  """Writes the files."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--num_terms", type=int, default=8)
  arguments = parser.parse_args()
  folder = arguments.folder
  folder.mkdir(parents=True, exist_ok=True)
  generator = np.random.default_rng(0)
  num = NUM_DOCUMENTS + 2 * NUM_QUESTIONS
  # More than needed: duplicates are dropped.
  drawn = generator.integers(0, 10, (2 * num, arguments.num_terms))
  terms = np.array(list(dict.fromkeys(map(tuple, drawn.tolist()))))[:num]
  assert len(terms) == num
  questions = ["+".join(map(str, row)) + "=" for row in terms.tolist()]
  sums = np.cumsum(terms, axis=1)[:, 1:].tolist()
  for name, start in (("validation", 0), ("test", NUM_QUESTIONS)):
    chosen = range(start, start + NUM_QUESTIONS)
    _write(
      folder / f"{name}.jsonl",
      [{"question": questions[n], "answer": sums[n][-1]} for n in chosen],
    )
  _write(
    folder / "train.jsonl",
    [
      {"text": questions[n] + ",".join(map(str, sums[n]))}
      for n in range(2 * NUM_QUESTIONS, num)
    ],
  )


def _write(path: pathlib.Path, rows: list[dict[str, object]]) -> None:
  path.write_text(
    "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
  )


if __name__ == "__main__":
  main()
