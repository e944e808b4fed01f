"""Packs sources into rows once, and caches the rows for later runs.

Every split of a source is one ArrayRecord file of rows in the user's cache,
under a checksum of the files' content and of every setting that affects rows.
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from array_record.python import array_record_data_source as array_record

from loopjax.data.text import documents, files, preparation
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import SEPARATOR, Config
from loopjax.errors import UserError
from loopjax.run import user_cache

_VERSION = 5  # Version of the cached format.


class Corpus(NamedTuple):
  """The rows of one source.

  Attributes:
    name: name of the source.
    paths: its files.
    folder: cache folder of its rows, named after the checksum of `_key`.
    job: the settings that determine the rows; where a split had no document,
      those of `preparation.filled`.
    facts: the counts of `packing.pack` by split, and "documents_empty" and
      "documents_skipped".
  """

  name: str
  paths: list[str]
  folder: pathlib.Path
  job: preparation.Job
  facts: dict[str, Any]

  def num_rows(self, split: str) -> int:
    """The number of rows of a split."""
    return self.facts[split].get("rows", 0)

  def reader(self, split: str) -> Any:
    """The records of a split by position; the split must not be empty."""
    path = preparation.rows_file(self.folder, split)
    return array_record.ArrayRecordDataSource([str(path)])


def make(config: Config, source: str, *, is_test: bool = False) -> Corpus:
  """Reads and packs a source, unless its rows are in the cache.

  Args:
    config: the task.
    source: one of its sources.
    is_test: whether all documents are in the test split; otherwise the hash of
      a document's prompt or text decides its split.

  Raises:
    UserError: a file cannot be read or contains no text, a document is
      malformed, or the cache cannot be written.
  """
  tokenizer = tokenizer_lib.of(config)
  test_share = 0.0 if config.test_files else config.test_share
  shares = (0.0, 1.0) if is_test else (config.validation_share, test_share)
  job = preparation.Job(config, tokenizer.key, *shares)
  paths = files.find(source)
  made = _made(source, paths, job)
  if config.on_bad_document == "error" and made.facts["first_fault"]:
    raise UserError(made.facts["first_fault"])
  filled = preparation.filled(job, made.facts, paths)
  return made if filled == job else _made(source, paths, filled)


def _made(source: str, paths: list[str], job: preparation.Job) -> Corpus:
  """The rows that a job makes of a source."""
  before = [_state(path) for path in paths]

  def write(folder: pathlib.Path) -> None:
    print(f"{source}: reading, packing and caching in {folder.parent}")
    preparation.write(folder, job, source, paths)
    if [_state(path) for path in paths] != before:
      raise UserError(f"{source}: changed while it was being read; start again")

  folder = user_cache.entry("text", _key(job, paths), write)
  facts = json.loads((folder / preparation.FACTS).read_text())
  return Corpus(source, paths, folder, job, facts)


def digest(path: str) -> str:
  """SHA-256 of a file's content, hexadecimal; UserError if it is unreadable."""
  return _digest(path, _state(path))


def _key(job: preparation.Job, paths: Sequence[str]) -> str:
  """A checksum of the files and of every setting that affects the rows."""
  config = job.config
  settings = (
    _VERSION,
    files.CHUNK_BYTES,
    documents.SECTION_BYTES,
    job.tokenizer,
    config.sequence_length,
    config.text_field,
    config.prompt_field,
    job.validation,
    job.test,
    # A file's name determines its format.
    [(digest(path), files.kind_of(path)) for path in paths],
    # Without these, the checksum is that of versions that lacked them.
    *([job.text_bytes] if job.text_bytes else []),
    *([config.separator] if config.separator != SEPARATOR else []),
    *([] if config.packed else ["apart"]),
  )
  return hashlib.sha256(repr(settings).encode()).hexdigest()


def _state(path: str) -> tuple[int, int]:
  """A file's size and time, which change with its content."""
  try:
    state = os.stat(path)
  except OSError as error:
    raise files.unreadable(path, error) from None
  return state.st_size, state.st_mtime_ns


@functools.lru_cache(maxsize=4096)
def _digest(path: str, state: tuple[int, int]) -> str:
  """`digest`, cached, as every split needs the same files."""
  del state
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise files.unreadable(path, error) from None
