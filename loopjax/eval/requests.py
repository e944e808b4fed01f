"""Request files of OLMES: prompts and continuations, ready to be scored.

The format is from github.com/allenai/OLMo-in-loop-evals: JSON lines, one per
continuation, with "doc_id", "idx" (the index of the choice), "label" (the index
of the gold choice, or a text if there are no choices) and "request", which has
"context" and "continuation". Requests whose doc_id is 1,000,000 or more request
the unconditional likelihood of the same continuations and are skipped.
"""

import hashlib
import pathlib
from typing import Any, NamedTuple

from loopjax.data.text import files as files_lib
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib

_UNCONDITIONAL = 1_000_000  # doc_id from which requests are unconditional.
_SUFFIX = ".jsonl.gz"


class EvalItem(NamedTuple):
  """A question.

  Attributes:
    doc_id: its id in the file.
    contexts, continuations: one per choice; a single one without choices.
      Spaces at the end of a context are moved to its continuation.
    gold: index of the correct choice.
    is_choice: whether the question is multiple-choice.
  """

  doc_id: int
  contexts: tuple[str, ...]
  continuations: tuple[str, ...]
  gold: int
  is_choice: bool


class EvalTask(NamedTuple):
  """The questions of a request file.

  Attributes:
    name: the task's name.
    items: the questions.
    facts: metadata to store with the scores, as JSON.
  """

  name: str
  items: list[EvalItem]
  facts: dict[str, Any]


def find(names: str, folder: pathlib.Path | None) -> list[pathlib.Path]:
  """The request files that --tasks names.

  Args:
    names: comma-separated paths, or names of files in `folder` without the
      suffix .jsonl.gz.
    folder: folder of request files; None to allow paths only.

  Raises:
    UserError: a name is neither of these.
  """
  files = sorted(folder.glob(f"*{_SUFFIX}")) if folder else []
  by_name = {path.name.removesuffix(_SUFFIX): path for path in files}
  paths = []
  for name in filter(None, (part.strip() for part in names.split(","))):
    path = by_name.get(name, pathlib.Path(name))
    if not path.is_file():
      available = f"{folder} has {', '.join(by_name) or 'none'}"
      raise UserError(
        f"--tasks={name}: no such file or task;"
        f" {available if folder else 'to pass names, set --folder'}"
      )
    paths.append(path)
  if not paths:
    raise UserError("--tasks is empty; pass request files")
  return paths


def read(
  path: pathlib.Path, limit: int = 0, zero_shot: bool = False
) -> EvalTask:
  """Reads a request file.

  Args:
    path: the file. Metadata on its prompts is read from NAME.config.json in the
      same folder, if it exists.
    limit: number of questions to read, from the start; 0 for all.
    zero_shot: remove the solved examples before each question; if there are
      any, "_0shot_local" is appended to the task's name.

  Raises:
    UserError: the file cannot be read, or a line is not a request.
  """
  name = path.name.removesuffix(".gz").removesuffix(".jsonl")
  by_doc: dict[int, list[tuple[int, str, str, Any]]] = {}
  shortened = False
  for where, row in files_lib.json_lines(path):
    try:
      doc_id, request = row["doc_id"], row["request"]
      if type(doc_id) is not int:
        raise TypeError(f"doc_id={doc_id!r} is not an integer")
      if doc_id >= _UNCONDITIONAL:
        continue
      context, continuation = request["context"], request["continuation"]
      if zero_shot:
        question = _question(row["doc"], context)
        shortened |= question != context
        context = question
      encoded = (context + continuation).encode()
      index = int(str(row["idx"]))  # 0.5 is none.
      choice = (index, context, continuation, row["label"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(
        f"{where}: invalid request ({type(error).__name__}: {error})"
      ) from None
    if not continuation or not encoded:
      raise UserError(f"{where}: its continuation is empty")
    by_doc.setdefault(doc_id, []).append(choice)
  if not by_doc:
    raise UserError(f"{path}: contains no requests")
  chosen = sorted(by_doc)[: limit or None]
  items = [_item(path, doc_id, by_doc[doc_id]) for doc_id in chosen]
  if len({item.is_choice for item in items}) > 1:
    raise UserError(
      f"{path}: has questions with choices and questions without; put them into"
      " two files"
    )
  config = path.with_name(f"{name}.config.json")
  of_task = workdir_lib.read_json(config) if config.exists() else {}
  return EvalTask(
    name=f"{name}_0shot_local" if shortened else name,
    items=items,
    facts={
      "file": path.name,
      "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
      "num_fewshot": 0
      if shortened
      else of_task.get("task_config", {}).get("num_shots"),
      "limit": limit,
    },
  )


def _question(doc: dict[str, Any], context: str) -> str:
  """The prompt without the solved examples before the question."""
  question = doc.get("query") or f"Question: {doc['question']}\nAnswer:"
  if not context.endswith(question):
    raise ValueError("its prompt does not end with the question")
  return question


def _item(path: pathlib.Path, doc_id: int, choices: list[Any]) -> EvalItem:
  choices = sorted(choices, key=lambda choice: choice[0])
  indices, *texts, labels = zip(*choices, strict=True)
  # Scored as a part of the continuation, spaces count in its bytes too.
  moved = map(tokenizer_lib.spaces_moved, *texts)
  contexts, continuations = zip(*moved, strict=True)
  label = labels[0]
  is_choice = type(label) is int
  if indices != tuple(range(len(indices))) or not (
    label in indices if is_choice else len(indices) == 1
  ):
    raise UserError(
      f"{path}: doc_id {doc_id}: choices {list(indices)} and label {label!r} do"
      " not match"
    )
  if other := [one for one in labels if one != label]:
    raise UserError(
      f"{path}: doc_id {doc_id}: its lines contradict each other: label"
      f" {label!r} and label {other[0]!r}"
    )
  return EvalItem(
    doc_id, contexts, continuations, label if is_choice else 0, is_choice
  )
