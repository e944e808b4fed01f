"""Reads text files as chunks of a few MiB, and the documents of a chunk.

A chunk ends at the end of a line, a paragraph or a table row: another process
can parse its documents without the rest of the file.
A source "made:NAME" is synthetic text, for runs without any file: a file in the
user's cache, created at its first use.
"""

import codecs
import csv
import glob
import gzip
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopjax import checks
from loopjax.data import hub, pipeline
from loopjax.data.text import chat
from loopjax.data.text.chat import Segments, Template
from loopjax.errors import (
  MissingPackage,
  UserError,
  needing,
  one_line,
  unreadable,
)
from loopjax.run import user_cache

SYNTHETIC = "made:"
_VERSION = 1  # Version of the generated text.
_LINES, _IN_A_PARAGRAPH = 200_000, 40
_MODULUS, _MAX_OPERATIONS = 23, 4


def synthetic(source: str) -> str:
  """The file of a source.

  Raises:
    UserError: the name is unknown, or the cache cannot be written.
  """
  if source != f"{SYNTHETIC}arithmetic":
    raise UserError(
      f"{source}: unknown synthetic text; expected {SYNTHETIC}arithmetic"
    )

  def write(folder: pathlib.Path) -> None:
    (folder / "arithmetic.txt").write_text(_arithmetic(), encoding="utf-8")

  folder = user_cache.entry("text_made", f"arithmetic-{_VERSION}", write)
  return str(folder / "arithmetic.txt")


def _arithmetic() -> str:
  """Paragraphs of lines such as `7*(3-12)=6`, modulo 23."""
  from loopjax.data.arithmetic import task as arithmetic  # Only for these.

  positions = np.arange(_LINES)
  stream = pipeline.stream_seed(0, 0, 0)
  drawn = pipeline.uniforms(pipeline.stream_seed(1, 0, 0), positions, 1)[:, 0]
  operations = 1 + (drawn * _MAX_OPERATIONS).astype(np.int64)
  tokens = arithmetic.draw_expressions(
    _MODULUS, _MAX_OPERATIONS, stream, positions, operations, "train"
  )
  values = arithmetic.values_of(_MODULUS, tokens)
  lines = [
    f"{_infix(row)}={value}"
    for row, value in zip(tokens.tolist(), values.tolist(), strict=True)
  ]
  return "\n\n".join(
    "\n".join(lines[start : start + _IN_A_PARAGRAPH])
    for start in range(0, _LINES, _IN_A_PARAGRAPH)
  )


def _infix(tokens: list[int]) -> str:
  """Converts an expression from prefix to infix notation."""
  stack: list[str] = []
  for token in reversed(tokens):
    if token < 0:
      continue
    if token < _MODULUS:
      stack.append(str(token))
      continue
    left, right = (
      f"({part})" if not part.isdecimal() else part
      for part in (stack.pop(), stack.pop())
    )
    stack.append(f"{left}{'+-*'[token - _MODULUS]}{right}")
  return stack.pop()


CHUNK_BYTES = 4 << 20
PARAGRAPH = re.compile(rb"\n\r?\n")
_BLANK_LINES = (b"\n\n", b"\n\r\n")
_BLOCK = 1 << 20
_TABLE_ROWS = 4096  # Maximum number of table rows in a chunk.
_MAX_FIELD = 64 << 20  # Characters; a longer one probably lacks a quote.
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Chunk(NamedTuple):
  """A part of a file.

  Attributes:
    path: path of the file.
    kind: see `kind_of`.
    first: number of its first line ("jsonl", "csv", "tsv") or row ("parquet"),
      from 1; or of its first byte ("text"), from 0.
    content: bytes; rows as {column: value} of a table. In "csv" and "tsv" an
      entry per line: the row that begins there, the reason why it cannot be
      used, or None.
    read: bytes of the file read so far; 0 of a pipe.
    split: the split of all its documents, or "" if they choose it.
  """

  path: str
  kind: str
  first: int
  content: Any
  read: int
  split: str = ""


def find(source: str) -> list[str]:
  """The files of a source, sorted by name.

  Raises:
    UserError: no file matches, the source is a pipe, or a download fails.
  """
  if source.startswith(hub.PREFIX):
    return hub.download_all(source, "set task.train_files to local files")
  if source.startswith(SYNTHETIC):
    return [synthetic(source)]
  source = os.path.expanduser(source)
  if os.path.isdir(source):
    raise UserError(
      f"{source}: is a directory; expected files, such as "
      f"{source.rstrip('/')}/*"
    )
  if os.path.isfile(source):
    return [source]
  if os.path.exists(source):
    raise UserError(
      f"{source}: is a pipe or a device, which cannot be read twice; save its"
      " content as a file"
    )
  paths = sorted(
    p for p in glob.glob(source, recursive=True) if os.path.isfile(p)
  )
  if not paths:
    where = "" if os.path.isabs(source) else f" in {os.getcwd()}"
    raise UserError(f"{source}: no such file{where}")
  return paths


def read(
  path: str, columns: tuple[str, ...] | None = None, kind: str = ""
) -> Iterator[Chunk]:
  """The chunks of a file.

  Args:
    path: path of the file.
    columns: columns of a table to read; all if None.
    kind: see `kind_of`; by the file's name if "".

  Raises:
    UserError: the file cannot be read, or is truncated.
  """
  kind = kind or kind_of(path)
  try:
    with open(path, "rb") as file:
      is_page = path.lower().endswith((".html", ".htm"))
      wrong = "" if is_page else checks.wrong_file(file.peek(64))
      if wrong:
        raise UserError(f"{path}: {wrong}")
      if kind == "parquet":
        yield from _read_table(path, file, columns)
        return
      content = _unpacked(file)
      if content.peek(3)[:3] == codecs.BOM_UTF8:
        content.read(3)
      parts: Iterator[tuple[int, Any]]
      if kind in _DELIMITERS:
        parts = _read_csv(path, content, _DELIMITERS[kind], columns)
      else:
        parts = _lines(content) if kind == "jsonl" else _paragraphs(content)
      for first, chunk in parts:
        done = file.tell() if file.seekable() else 0  # A pipe has no place.
        yield Chunk(path, kind, first, chunk, done)
  except (EOFError, gzip.BadGzipFile, zlib.error, _Damaged) as error:
    raise UserError(
      f"{path}: the compressed data is corrupt ({one_line(error)}); copy or"
      " download it again"
    ) from None
  except OSError as error:
    raise unreadable(path, error) from None


class _Damaged(Exception):
  """Zstandard data are corrupt or truncated."""


class _Zstandard(io.RawIOBase):
  """A file compressed with Zstandard; raises if it is truncated, as gzip does.

  The library's own reader mistakes a truncated file for a shorter one.
  """

  def __init__(self, file):
    import zstandard

    self._file, self._library = file, zstandard
    self._frame, self._rest = None, b""

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while not self._rest:
      block = self._file.read(_BLOCK // 4)
      if not block:
        if self._frame is not None:
          raise _Damaged("it ends in the middle of a frame")
        return 0
      self._rest = self._unpack(block)
    part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
    buffer[: len(part)] = part
    return len(part)

  def _unpack(self, block: bytes) -> bytes:
    parts = []
    try:
      while block:
        if self._frame is None:
          self._frame = self._library.ZstdDecompressor().decompressobj()
        parts.append(self._frame.decompress(block))
        block = b""
        if self._frame.eof:
          block, self._frame = self._frame.unused_data, None
    except self._library.ZstdError as error:
      raise _Damaged(one_line(error)) from None
    return b"".join(parts)


def _unpacked(file: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
  """The content of a file, decompressed according to its first bytes."""
  magic = file.peek(4)[:4]
  if magic[:2] == b"\x1f\x8b":
    return gzip.GzipFile(fileobj=file)
  is_skipped = magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5
  if magic == b"\x28\xb5\x2f\xfd" or is_skipped:  # As pzstd begins a file.
    with needing("zstandard", "lm", f"{file.name}: needs"):
      return io.BufferedReader(_Zstandard(file), _BLOCK)
  return file


def _lines(content) -> Iterator[tuple[int, bytes]]:
  """(number of the first line, from 1; whole lines)."""
  line = 1
  while lines := content.readlines(CHUNK_BYTES):
    yield line, b"".join(lines)
    line += len(lines)


def _paragraphs(content) -> Iterator[tuple[int, bytes]]:
  """(number of the first byte, text up to the end of a paragraph or line)."""
  at, rest = 0, b""
  while block := content.read(CHUNK_BYTES):
    text = rest + block
    blank = [(text.rfind(mark), len(mark)) for mark in _BLANK_LINES]
    breaks = [place + size for place, size in blank if place >= 0]
    stop = max(breaks, default=text.rfind(b"\n") + 1) or whole(text)
    yield at, text[:stop]
    at, rest = at + stop, text[stop:]
  if rest:
    yield at, rest


def whole(text: bytes, stop: int | None = None) -> int:
  """The end of the last whole UTF-8 character before `stop`."""
  stop = len(text) if stop is None else stop
  for back in range(1, min(4, stop) + 1):
    byte = text[stop - back]
    if byte >= 0xC0:  # First byte of a character: is it complete?
      size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
      return stop if back >= size else stop - back
    if byte < 0x80:
      break
  return stop


def _read_table(
  path: str, file: io.BufferedReader, columns: tuple[str, ...] | None
) -> Iterator[Chunk]:
  """The chunks of a parquet file, of about the same size as other chunks."""
  with needing("pyarrow", "lm", f"{path}: needs"):
    import pyarrow
    from pyarrow import parquet
  try:
    table = parquet.ParquetFile(file)
    names = table.schema_arrow.names
    num_rows, size = table.metadata.num_rows, os.fstat(file.fileno()).st_size
    _check_columns(path, names, columns)
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    row_bytes = sum(g.total_byte_size for g in groups) // max(num_rows, 1)
    num = max(1, min(_TABLE_ROWS, CHUNK_BYTES // max(row_bytes, 1)))
    first = 1
    for batch in table.iter_batches(num, columns=columns and list(columns)):
      rows = batch.to_pylist()
      done = first + len(rows) - 1
      yield Chunk(path, "parquet", first, rows, size * done // num_rows)
      first = done + 1
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(
      f"{path}: is not a valid parquet file ({one_line(error)}); copy or"
      " download it again"
    ) from None


def _read_csv(
  path: str, content: Any, delimiter: str, columns: tuple[str, ...] | None
) -> Iterator[tuple[int, list[Any]]]:
  """(number of the first line, `Chunk.content`) of a table with a header."""
  # Lines end with LF, CR LF, or CR, as spreadsheets of old Macs write.
  lines = io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="")
  reader = csv.reader(lines, delimiter=delimiter, strict=True)
  limit = csv.field_size_limit()
  header: list[str] | None = None
  first, entries, size = 1, [], 0
  try:
    while True:
      start = reader.line_num
      csv.field_size_limit(_MAX_FIELD)  # Of the process; its own is short.
      row = next(reader, None)
      csv.field_size_limit(limit)
      if row is None:
        break
      entry: Any = None
      if row and header is None:
        header = row
        _check_columns(path, header, columns)
        if len({*header}) < len(header):
          raise UserError(f"{path}: two columns have the same name")
      elif row and len(row) != len(header or ()):
        entry = f"has {len(row)} values, but {len(header or ())} columns"
      elif row:
        pairs = zip(header or (), row, strict=True)
        entry = {k: v for k, v in pairs if columns is None or k in columns}
      entries += [entry] + [None] * (reader.line_num - start - 1)
      size += sum(map(len, row))
      if size >= CHUNK_BYTES:
        yield first, entries
        first, entries, size = reader.line_num + 1, [], 0
  except csv.Error as error:
    raise UserError(
      f"{path}:{start + 1}: is not a valid table ({one_line(error)});"
      " is a quote missing?"
    ) from None
  finally:
    csv.field_size_limit(limit)
    lines.detach()  # Otherwise the caller's file would be closed.
  yield first, entries


def _check_columns(
  path: str, names: Sequence[str], columns: tuple[str, ...] | None
) -> None:
  """Raises UserError unless a table has the columns."""
  for column in columns or ():
    if column not in names:
      raise UserError(
        f"{path}: has no column {column!r}, only {', '.join(names)[:200]};"
        " see task.text_field and task.prompt_field"
      )


def kind_of(path: str) -> str:
  """Whether a file is "text", "jsonl", "csv", "tsv" or "parquet", by name."""
  name = path.lower()
  for compressed in (".gz", ".zst"):
    name = name.removesuffix(compressed)
  # Some corpora, such as C4, have an object per line in files named `.json`.
  if name.endswith((".jsonl", ".ndjson", ".json")):
    return "jsonl"
  for kind in ("parquet", *_DELIMITERS):
    if name.endswith(f".{kind}"):
      return kind
  return "text"


def json_lines(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Yields ("file:line", JSON value) for every non-empty line.

  A name without an extension, such as /dev/stdin, may be a pipe's.

  Raises:
    UserError: the file cannot be read, or a line is not JSON.
  """
  for chunk in read(str(path), (), "" if path.suffix else "jsonl"):
    if chunk.kind != "jsonl":
      raise UserError(
        f"{path}: expected a file name that ends with .jsonl, .jsonl.gz"
      )
    for number, row in enumerate(rows(chunk), chunk.first):
      if isinstance(row, Fault):
        raise UserError(f"{path}:{number}: {row}")
      if row is not None:
        yield f"{path}:{number}", row


SECTION_BYTES = 8 << 10  # Approximate size of a document of plain text.


class Fault(ValueError):
  """The reason why a document cannot be used."""


class Document(NamedTuple):
  """A document.

  Attributes:
    segments: its text; the last one is predicted. Empty without predicted text.
    prompt: what decides its split, see `chat.prompt`.
  """

  segments: Segments
  prompt: str


def documents(
  chunk: Chunk,
  text_field: str,
  prompt_field: str,
  separator: str,
  template: Template | None = None,
) -> Iterator[Document | Fault]:
  """Yields the documents of a chunk, and a Fault for each malformed one.

  The template writes conversations, of which a prompt and its text are one.
  Without it, the separator ends every segment but the last.
  """
  if chunk.kind == "text":
    for section in sections(chunk):
      if isinstance(section, Fault):
        yield section
      else:
        yield Document([(section, True)], section)
    return
  for number, row in enumerate(rows(chunk), chunk.first):
    if row is None:
      continue
    try:
      yield _document(row, text_field, prompt_field, separator, template)
    except MissingPackage:
      raise
    except (Fault, UserError) as error:
      yield Fault(f"{chunk.path}:{number}: {error}")


def sections(chunk: Chunk) -> Iterator[str | Fault]:
  """Plain text, cut at the first blank line after SECTION_BYTES."""
  text, at = chunk.content, 0
  while at < len(text):
    stop = cut(text, at + SECTION_BYTES, at + 2 * SECTION_BYTES)
    section, at = text[at:stop], stop
    first = chunk.first + stop - len(section)
    if (null := section.find(b"\0")) >= 0:  # UTF-8, but of no text.
      yield Fault(
        f"{chunk.path}: byte {first + null} is 0: it is not plain text; is it"
        " an archive, or UTF-16?"
      )
      continue
    try:
      yield section.decode()
    except UnicodeDecodeError as error:
      where = first + error.start
      yield Fault(f"{chunk.path}: byte {where} is not UTF-8; save it as UTF-8")


def cut(text: bytes, low: int, high: int) -> int:
  """The end of the first paragraph, or else line, in a range of plain text.

  Without either it is `low`, or a few bytes less to keep a character whole.
  """
  if low >= len(text):
    return len(text)
  if found := PARAGRAPH.search(text, low, high):
    return found.end()
  line = text.find(b"\n", low, high)
  if line >= 0:
    return line + 1
  return whole(text, low)


def rows(chunk: Chunk) -> Iterator[Any]:
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
      row = json.loads(line)
      yield Fault("is null; remove such rows") if row is None else row
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


def _document(
  row: Any,
  text_field: str,
  prompt_field: str,
  separator: str,
  template: Template | None,
) -> Document:
  """The document of a row."""
  if isinstance(row, Fault):
    raise row
  if not isinstance(row, dict):
    raise Fault("is not a JSON object; expected one object per line")
  for field in filter(None, (prompt_field, text_field)):
    if field in row and row[field] is None:
      raise Fault(f"its {field!r} is null; remove such rows")
    if field not in row:
      fields = ", ".join(map(str, row))[:100]
      raise Fault(
        f"has no {field!r}, only {fields}; see task.text_field and"
        " task.prompt_field"
      )
  text = row[text_field]
  if isinstance(text, list):
    try:
      turns = [chat.turn(turn, template) for turn in text]
    except UserError as error:
      raise Fault(f"{text_field!r}: {error}") from error
  else:
    turns = [{"role": "assistant", "content": text}]
    if not prompt_field:
      template = None
  if prompt_field:  # A conversation has its own first turn of the user.
    role = "system" if isinstance(text, list) else "user"
    turns.insert(0, {"role": role, "content": row[prompt_field]})
  for number, turn in enumerate(turns):
    is_prompt = prompt_field and not number
    _checked(turn["content"], prompt_field if is_prompt else text_field)
  return Document(chat.segments(turns, template, separator), chat.prompt(turns))


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
