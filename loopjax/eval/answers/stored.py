"""The file of answers: settings in the first line, then an answer per line.

An answer is written as soon as it is finished, so that a killed process loses
only those in progress.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from loopjax.errors import UserError

Key = tuple[int, int]  # The number of a question, and of one of its samples.


class Answers(NamedTuple):
  """The answers of an open file.

  Attributes:
    by_key: each with at least "question" and "sample", its key.
    stream: the file, which stays empty until the first answer: a failed command
      stores no settings.
    head: the first line still to be written; "" if the file has it.
  """

  by_key: dict[Key, dict[str, Any]]
  stream: IO[str]
  head: str

  def add(self, key: Key, row: dict[str, Any]) -> None:
    """Adds an answer, in memory and at the end of the file."""
    question, sample = key
    row = {"question": question, "sample": sample, **row}
    if not self.by_key:
      self.stream.write(self.head)
    self.by_key[key] = row
    self.stream.write(_line(row))
    self.stream.flush()


@contextlib.contextmanager
def opened(path: pathlib.Path, facts: dict[str, Any]) -> Iterator[Answers]:
  """Opens or creates a file of answers.

  Args:
    path: the file; its folder is created.
    facts: the settings that the answers depend on, as JSON.

  Raises:
    UserError: the file cannot be read or written, or its answers depend on
      other settings.
  """
  head = _line({"facts": facts})
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    # A killed process may have written an incomplete line.
    complete = content[: content.rfind("\n") + 1]
    by_key = _read(path, complete, json.loads(head)) if complete else {}
    with path.open("r+" if content else "w", encoding="utf-8") as stream:
      stream.truncate(len(complete.encode()))
      stream.seek(0, 2)
      yield Answers(by_key, stream, "" if complete else head)
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not UTF-8"
    raise UserError(f"{path}: cannot be read or written ({reason})") from error


def _read(
  path: pathlib.Path, content: str, head: dict[str, Any]
) -> dict[Key, dict[str, Any]]:
  """Answers by key; raises UserError if their settings differ."""
  by_key = {}
  for number, line in enumerate(content.splitlines(), 1):
    try:
      row = json.loads(line)
      if number == 1:
        theirs, ours = row["facts"], head["facts"]
        differences = [
          f"{name}={theirs.get(name)!r}, not {ours.get(name)!r}"
          for name in {**theirs, **ours}
          if theirs.get(name) != ours.get(name)
        ]
      else:
        by_key[row["question"], row["sample"]] = row
    except (AttributeError, KeyError, TypeError, ValueError):
      raise UserError(f"{path}:{number}: is damaged") from None
    if differences:
      raise UserError(
        f"{path}: contains answers generated with other settings:"
        f" {'; '.join(differences)}; choose another --out"
      )
  return by_key


def _line(row: dict[str, Any]) -> str:
  return json.dumps(row, allow_nan=False) + "\n"
