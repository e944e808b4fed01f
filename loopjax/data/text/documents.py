"""Reads the documents of a chunk and reports malformed ones."""

import json
from collections.abc import Iterator
from typing import Any

from loopjax.data.text import files

SECTION_BYTES = 8 << 10  # Approximate size of a document of plain text.
_PREDICTED = ("assistant", "gpt", "model")  # Role names of three conventions.

# A document: spans of text, and whether each is predicted.
Segments = list[tuple[str, bool]]


class Fault(ValueError):
  """The reason why a document cannot be used."""


def read(
  chunk: files.Chunk, text_field: str, prompt_field: str, separator: str
) -> Iterator[Segments | Fault]:
  """Yields the documents of a chunk, and a Fault for each malformed one.

  The separator ends every segment but the last.

  The last segment of a document is always predicted; a document without
  predicted text is empty.
  """
  if chunk.kind == "text":
    for section in sections(chunk):
      yield section if isinstance(section, Fault) else [(section, True)]
    return
  for number, row in enumerate(rows(chunk), chunk.first):
    if row is None:
      continue
    try:
      yield _segments(row, text_field, prompt_field, separator)
    except Fault as error:
      yield Fault(f"{chunk.path}:{number}: {error}")


def sections(chunk: files.Chunk) -> Iterator[str | Fault]:
  """Plain text, cut at the first blank line after SECTION_BYTES."""
  text, at = chunk.content, 0
  while at < len(text):
    stop = _cut(text, at)
    section, at = text[at:stop], stop
    try:
      yield section.decode()
    except UnicodeDecodeError as error:
      where = chunk.first + stop - len(section) + error.start
      yield Fault(f"{chunk.path}: byte {where} is not UTF-8; save it as UTF-8")


def _cut(text: bytes, start: int) -> int:
  """The end of the section that starts at `start`."""
  return cut(text, start + SECTION_BYTES, start + 2 * SECTION_BYTES)


def cut(text: bytes, low: int, high: int) -> int:
  """The end of the first paragraph, or else line, in a range of plain text.

  Without either it is `low`, or a few bytes less to keep a character whole.
  """
  if low >= len(text):
    return len(text)
  if found := files.PARAGRAPH.search(text, low, high):
    return found.end()
  line = text.find(b"\n", low, high)
  if line >= 0:
    return line + 1
  return files.whole(text, low)


def rows(chunk: files.Chunk) -> Iterator[Any]:
  """Rows of a table, or JSON values; None for an empty line, or a Fault."""
  if chunk.kind == "parquet":
    yield from chunk.content
    return
  if chunk.kind in ("csv", "tsv"):
    yield from map(_checked_row, chunk.content)
    return
  for line in chunk.content.split(b"\n"):
    if not line.strip():
      yield None
      continue
    try:
      yield json.loads(line)
    except UnicodeDecodeError:
      yield Fault("is not UTF-8; save the file as UTF-8")
    except (ValueError, RecursionError):
      yield Fault("is not valid JSON; expected one object per line")


def _checked_row(row: Any) -> Any:
  """A row of CSV, or a Fault if it is malformed or not UTF-8."""
  if isinstance(row, str):
    return Fault(row)
  try:
    "".join(row or ()).encode()
    "".join((row or {}).values()).encode()
  except UnicodeEncodeError:
    return Fault("is not UTF-8; save the file as UTF-8")
  return row


def _segments(
  row: Any, text_field: str, prompt_field: str, separator: str
) -> Segments:
  """The document of a row."""
  if isinstance(row, Fault):
    raise row
  if not isinstance(row, dict):
    raise Fault("is not a JSON object; expected one object per line")
  for field in filter(None, (prompt_field, text_field)):
    if field in row and row[field] is None:
      raise Fault(f"its {field!r} is null; remove such rows")
    if field not in row:
      there = ", ".join(map(str, row))[:100]
      raise Fault(
        f"has no {field!r}, only {there}; see task.text_field and"
        " task.prompt_field"
      )
  segments: Segments = []
  if prompt_field:
    segments.append((_checked(row[prompt_field], prompt_field), False))
  text = row[text_field]
  if isinstance(text, list):
    segments += [_turn(turn, text_field) for turn in text]
  else:
    segments.append((_checked(text, text_field), True))
  while segments and not (segments[-1][1] and segments[-1][0]):
    segments.pop()  # Text after the last completion has no loss.
  return [
    (text + separator if place < len(segments) else text, predicted)
    for place, (text, predicted) in enumerate(segments, 1)
  ]


def _turn(turn: Any, field: str) -> tuple[str, bool]:
  """One turn of a conversation."""
  for who, what in (("from", "value"), ("role", "content")):
    if isinstance(turn, dict) and who in turn and what in turn:
      return _checked(turn[what], f"{field}.{what}"), turn[who] in _PREDICTED
  raise Fault(
    f"{field!r} is not a conversation; each turn has 'from' and 'value', or"
    " 'role' and 'content'"
  )


def _checked(text: Any, field: str) -> str:
  """The value of a field; a Fault unless it is text that UTF-8 can encode."""
  if not isinstance(text, str):
    raise Fault(f"{field!r} is not a string")
  try:
    text.encode()
  except UnicodeEncodeError:
    raise Fault(
      f"{field!r} contains a lone surrogate (half a character)"
    ) from None
  return text
