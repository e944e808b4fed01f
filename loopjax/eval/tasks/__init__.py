"""Offline tasks for lm-evaluation-harness: the functions of their YAML files.

Documents are read from the OLMES request files in the folder given by
`--metadata=folder=DIR`, with the same prompts as in `loopjax.eval`; `text` and
`gsm8k_local` read JSON lines from that folder.
"""

import math
import pathlib
from typing import Any

from loopjax.data.text import files
from loopjax.errors import UserError
from loopjax.eval import requests


def _documents(documents: list[dict[str, Any]]) -> dict[str, Any]:
  import datasets  # Dependency of lm-evaluation-harness.

  return {"test": datasets.Dataset.from_list(documents)}


def _path(file: str, folder: str) -> pathlib.Path:
  if not folder:
    raise UserError("the task needs its data: --metadata=folder=DIR")
  path = pathlib.Path(folder, file)
  if not path.is_file():
    raise UserError(f"--metadata=folder={folder}: {file} does not exist")
  return path


def request_file(file: str, folder: str = "", **_: Any) -> dict[str, Any]:
  """Questions of a request file, with "context", "continuations", "gold".

  Raises:
    UserError: the file is missing, or choices differ in their prompts.
  """
  path = _path(file, folder)
  items = requests.read(path).items
  if any(len(set(item.contexts)) > 1 for item in items):
    raise UserError(f"{path}: the choices of a question have different prompts")
  return _documents(
    [
      {
        "context": item.contexts[0],
        "continuations": list(item.continuations),
        "gold": item.gold,
      }
      for item in items
    ]
  )


def json_lines(file: str, folder: str = "", **_: Any) -> dict[str, Any]:
  """Objects of a file of JSON lines."""
  return _documents([row for _, row in files.json_lines(_path(file, folder))])


def choice_scores(
  document: dict[str, Any], results: list[tuple[float, bool]]
) -> dict[str, float]:
  """Scores of a multiple-choice question, see `bits_per_byte`."""
  likelihoods = [likelihood for likelihood, _ in results]
  texts, gold = document["continuations"], document["gold"]
  per_char = [x / len(t) for x, t in zip(likelihoods, texts, strict=True)]
  return {
    "accuracy": float(likelihoods.index(max(likelihoods)) == gold),
    "accuracy_per_char": float(per_char.index(max(per_char)) == gold),
    "bits_per_byte_of_answer": _bits(likelihoods[gold], texts[gold]),
  }


def text_scores(
  document: dict[str, Any], results: list[tuple[float, bool]]
) -> dict[str, float]:
  """Scores of a question with one answer, see `bits_per_byte`."""
  ((likelihood, is_greedy),) = results
  return {
    "greedy_match": float(is_greedy),
    "bits_per_byte_of_answer": _bits(
      likelihood, document["continuations"][document["gold"]]
    ),
  }


def _bits(likelihood: float, text: str) -> float:
  """Bits per byte."""
  return -likelihood / math.log(2) / len(text.encode())
