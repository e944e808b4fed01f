"""Offline tasks for lm-evaluation-harness: the functions of their YAML files.

They read their data from the folder given by `--metadata=folder=DIR`: the tasks
`olmes_*` the request files of OLMES, the others JSON lines.

A request file (github.com/allenai/OLMo-in-loop-evals) has one line per
continuation, with "doc_id", "idx" (the index of the choice), "label" (the index
of the gold choice, or a text if there are no choices) and "request", which has
"context" and "continuation". Requests whose doc_id is 1,000,000 or more request
the unconditional likelihood of the same continuations and are skipped.

Bits per byte are -log2 p of the gold continuation given its prompt, divided by
its bytes in UTF-8; spaces before the continuation count, those at the end of
the prompt too (OLMES' "v2"; the metric of Frey et al., arXiv 2603.08391).
"""

import math
import pathlib
import re
from typing import Any

from loopjax.data.text import files
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.errors import UserError

_UNCONDITIONAL = 1_000_000  # doc_id from which requests are unconditional.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_KS = (1, 10)  # Of pass@k.


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
  """See `questions`."""
  return _documents(questions(_path(file, folder)))


def questions(path: pathlib.Path) -> list[dict[str, Any]]:
  """Questions of a request file: "context", "continuations" and "gold".

  Raises:
    UserError: a line is not a request, or the lines of a question contradict
      each other.
  """
  by_doc: dict[int, list[tuple[int, str, str, Any]]] = {}
  for where, row in files.json_lines(path):
    try:
      doc_id, request = int(row["doc_id"]), row["request"]
      # Scored as a part of the continuation, spaces count in its bytes too.
      context, continuation = tokenizer_lib.spaces_moved(
        request["context"], request["continuation"]
      )
      choice = int(row["idx"]), context, continuation, row["label"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(
        f"{where}: invalid request ({type(error).__name__}: {error})"
      ) from None
    if not continuation:
      raise UserError(f"{where}: its continuation is empty")
    if doc_id < _UNCONDITIONAL:
      by_doc.setdefault(doc_id, []).append(choice)
  return [_question(path, x, by_doc[x]) for x in sorted(by_doc)]


def _question(
  path: pathlib.Path, doc_id: int, choices: list[tuple[int, str, str, Any]]
) -> dict[str, Any]:
  """A question of its choices, in any order."""
  choices = sorted(choices, key=lambda choice: choice[0])
  indices, contexts, continuations, labels = zip(*choices, strict=True)
  gold = labels[0] if isinstance(labels[0], int) else 0
  if (
    indices != tuple(range(len(indices)))
    or gold not in indices
    or any(x != labels[0] for x in labels)
    or any(x != contexts[0] for x in contexts)
  ):
    raise UserError(
      f"{path}: doc_id {doc_id}: expected one line per choice, idx 0, 1, ...,"
      " with the same context, and as label the idx of one"
    )
  return {
    "context": contexts[0],
    "continuations": list(continuations),
    "gold": gold,
  }


def json_lines(file: str, folder: str = "", **_: Any) -> dict[str, Any]:
  """Objects of a file of JSON lines."""
  return _documents([row for _, row in files.json_lines(_path(file, folder))])


def choice_scores(
  document: dict[str, Any], results: list[tuple[float, bool]]
) -> dict[str, float]:
  """Scores of a multiple-choice question.

  The model chooses the highest log-likelihood ("accuracy"), or the highest per
  character, including the leading space ("accuracy_per_char").
  """
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
  """Scores of a question with one answer.

  "greedy_match": whether greedy decoding produces it.
  """
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


def pass_scores(
  document: dict[str, Any], results: list[list[str]]
) -> dict[str, float]:
  """pass@k of a question: that at least one of k sampled answers is right.

  The unbiased estimate from n samples, of which c are right: 1 - C(n - c, k) /
  C(n, k) (arXiv 2107.03374, equation 1). An answer is right if its last number
  equals the last one of the document's "answer".
  """
  (texts,) = results
  right = _last_number(document["answer"])
  wrong = sum(_last_number(text) != right for text in texts)
  return {
    f"pass@{k}": 1 - math.comb(wrong, k) / math.comb(len(texts), k) for k in _KS
  }


def _last_number(text: str) -> float | None:
  found = _NUMBER.findall(text)
  return float(found[-1].replace(",", "")) if found else None
