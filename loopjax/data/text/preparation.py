"""Splits, tokenises and packs sources into rows once, for all later runs.

Every split of a source is one ArrayRecord file of rows in the user's cache,
under a checksum of the files' content and of every setting that affects rows.
"""

import collections
import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tqdm
from array_record.python import array_record_data_source as array_record
from array_record.python import array_record_module

from loopjax.data.text import chat, files, packing
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import SEPARATOR, Config
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError, unreadable
from loopjax.run import user_cache

SPLITS = ("train", "validation", "test")
FACTS = "facts.json"
_OPTIONS = "group_size:1,uncompressed"  # Random access to single rows.


class Job(NamedTuple):
  """The settings that, with its content, determine the rows of a source.

  Attributes:
    config: the task.
    tokenizer: `Tokenizer.key`, the checksum of the tokenizer.
    validation, test: shares of these splits.
    template: writes conversations, see `files.documents`.
    text_bytes: size of all plain text, if its splits are cut by position.
  """

  config: Config
  tokenizer: str
  validation: float
  test: float
  template: chat.Template | None = None
  text_bytes: int = 0

  def read(self, chunk: files.Chunk) -> Iterator[files.Document | files.Fault]:
    """The documents of a chunk, see `files.documents`."""
    c = self.config
    return files.documents(
      chunk, c.text_field, c.prompt_field, c.separator, self.template
    )

  @property
  def splits(self) -> dict[str, float]:
    """The splits that documents are in, in the order of text, with shares."""
    train = 1 - self.validation - self.test
    shares = zip(SPLITS, (train, self.validation, self.test), strict=True)
    return {split: share for split, share in shares if share > 0}

  def split_of(self, prompt: str) -> str:
    """The split of a document by its `prompt`."""
    place = _place(prompt)
    if place < self.test:
      return "test"
    return "validation" if place >= 1 - self.validation else "train"


def _place(prompt: str) -> float:
  """The hash of a document's `prompt`, in [0, 1]."""
  digest = hashlib.sha256(prompt.encode()).digest()
  return int.from_bytes(digest[:8], "little") / 2**64


class _Part(NamedTuple):
  """A chunk's rows by split, and counts of unused documents."""

  splits: dict[str, packing.Packed]
  num_skipped: int
  first_fault: str
  num_empty: int
  example: str


def write(
  folder: pathlib.Path, job: Job, source: str, paths: Sequence[str]
) -> None:
  """Writes the rows of all splits, and facts about them.

  Args:
    folder: output folder.
    job: the settings that determine the rows.
    source: the name of the source.
    paths: the files of the source.

  Raises:
    UserError: see `make`.
  """
  totals = {split: collections.Counter[str]() for split in SPLITS}
  num_skipped, first_fault, num_empty, example = 0, "", 0, ""
  with contextlib.ExitStack() as stack:
    writers = {}
    for split in SPLITS:
      path = str(rows_file(folder, split))
      writers[split] = array_record_module.ArrayRecordWriter(path, _OPTIONS)
      stack.callback(_checked, writers[split].close)
    size = sum(os.path.getsize(path) for path in paths)
    found = chunks(job, paths)
    for part in in_order(functools.partial(_pack, job), found, size):
      first_fault = first_fault or part.first_fault
      example = example or part.example
      num_skipped += part.num_skipped
      num_empty += part.num_empty
      if first_fault and job.config.on_bad_document == "error":
        raise UserError(first_fault)
      for split, packed in part.splits.items():
        totals[split].update(packed.counts)
        for record in packed.records:
          _checked(writers[split].write, record)
  if not any(total["rows"] for total in totals.values()):
    why = ""
    if num_empty:
      why = f"; {num_empty} have no token to predict"
    if first_fault:
      why += f"; {num_skipped} are malformed, the first one: {first_fault}"
    raise UserError(f"{source}: contains no documents{why}")
  facts = {
    **totals,
    "documents_empty": num_empty,
    "documents_skipped": num_skipped,
    "first_fault": first_fault,
    "example": example,
  }
  (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def rows_file(folder: pathlib.Path, split: str) -> pathlib.Path:
  """The file of the rows of a split."""
  return folder / f"{split}.array_record"


def fill_splits(
  job: Job, facts: Mapping[str, Any], paths: Sequence[str]
) -> Job:
  """The job with which every split has a document, if there is one.

  Plain text is cut by position. Of other files, the document that is nearest to
  an empty split by its hash moves there.

  Args:
    job: the settings that made the rows.
    facts: what `write` says of them.
    paths: the files of the source.
  """
  empty = [split for split in job.splits if not facts[split].get("rows", 0)]
  if not empty:
    return job
  places: list[float] = []
  text_bytes = 0
  for chunk in chunks(job, paths):
    if chunk.kind == "text":
      text_bytes += len(chunk.content)
      continue
    for found in job.read(chunk):
      if not isinstance(found, files.Fault) and found.segments:
        places.append(_place(found.prompt))
  if text_bytes:
    return job._replace(text_bytes=text_bytes)
  if len({*places}) < len(job.splits):
    return job
  if "test" in empty:
    job = job._replace(test=math.nextafter(min(places), 1))
  if "validation" in empty:
    job = job._replace(validation=math.nextafter(1 - max(places), 1))
  return job


def chunks(job: Job, paths: Sequence[str]) -> Iterator[files.Chunk]:
  """The chunks of all files, with a progress bar at a terminal."""
  config, at = job.config, 0
  columns = tuple(filter(None, (config.prompt_field, config.text_field)))
  sizes = [os.path.getsize(path) for path in paths]
  done = 0
  bar = tqdm.tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=None)
  with bar:
    for path, size in zip(paths, sizes, strict=True):
      for chunk in files.read(path, columns):
        bar.update(done + chunk.read - bar.n)
        if job.text_bytes and chunk.kind == "text":
          yield from _by_position(job, chunk, at)
          at += len(chunk.content)
        else:
          yield chunk
      done += size
      bar.update(done - bar.n)


def _by_position(
  job: Job, chunk: files.Chunk, at: int
) -> Iterator[files.Chunk]:
  """Parts of plain text that begins at a byte of all text, with their splits.

  They end with a paragraph or a line if there is one in half of a part's size.
  """
  start, end, smallest = 0, 0.0, min(job.splits.values()) * job.text_bytes
  for split, share in job.splits.items():
    end += share * job.text_bytes
    low = round(end) - at
    stop = files.cut(chunk.content, low, low + int(smallest / 2))
    if low > 0 and stop > start:
      part = chunk.content[start:stop]
      yield chunk._replace(first=chunk.first + start, content=part, split=split)
      start = stop


def _checked(call: Any, *args: Any) -> None:
  """Calls ArrayRecord, which reports a full disk as a RuntimeError."""
  try:
    call(*args)
  except RuntimeError as error:
    if "No space left" in str(error):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    raise


def _pack(job: Job, chunk: files.Chunk) -> _Part:
  """The rows of a chunk."""
  config = job.config
  tokenizer = _tokenizer(config, job.tokenizer)
  ends = [tokenizer.token(x) or "" for x in (tokenizer.begin, tokenizer.end)]
  by_split: dict[str, list[files.Segments]] = {s: [] for s in SPLITS}
  num_skipped, first_fault, num_empty, example = 0, "", 0, ""
  for found in job.read(chunk):
    if isinstance(found, files.Fault):
      num_skipped += 1
      first_fault = first_fault or str(found)
    elif not found.segments:
      num_empty += 1
    else:
      split = chunk.split or job.split_of(found.prompt)
      segments = found.segments
      if job.template:
        segments = chat.between(segments, *ends)
      example = example or chat.shown(segments, *ends)
      by_split[split].append(segments)
  return _Part(
    {
      split: packing.pack(
        _tokenised(found, tokenizer, config.sequence_length),
        config.sequence_length,
        tokenizer.num_ids,
        config.packed,
      )
      for split, found in by_split.items()
    },
    num_skipped,
    first_fault,
    num_empty,
    example,
  )


@functools.lru_cache(maxsize=1)
def _tokenizer(config: Config, key: str) -> Tokenizer:
  """The tokenizer, loaded once per process."""
  tokenizer = tokenizer_lib.of(config)
  if tokenizer.key != key:
    raise UserError(
      f"task.tokenizer={config.tokenizer}: changed while it was being used; "
      "start again"
    )
  return tokenizer


def _tokenised(
  found: Sequence[files.Segments], tokenizer: Tokenizer, length: int
) -> list[packing.Document]:
  """Documents as token ids, for rows of a length."""
  ids = tokenizer.encode_parts([[text for text, _ in part] for part in found])
  dtype = packing.token_dtype(tokenizer.num_ids)
  begin, end = (
    np.array([one], dtype) for one in (tokenizer.begin, tokenizer.end)
  )
  tokenised = []
  for segments, parts in zip(found, ids, strict=True):
    tokens = np.concatenate([begin, *parts, end], dtype=dtype, casting="unsafe")
    counted = np.ones(len(tokens) - 1, bool)
    num_bytes = start = 0
    for (text, predicted), part in zip(segments, parts, strict=True):
      stop = start + len(part)
      if predicted:
        num_bytes += len(text.encode())
      else:
        counted[start:stop] = False
      start = stop
    sizes = np.where(counted, tokenizer.num_bytes[tokens[1:]], 0)
    corrections = np.zeros(len(counted), np.int64)
    if missing := num_bytes - int(sizes.sum()):
      if len(counted) > length:
        corrections = _sizes(segments, counted, tokenizer) - sizes
      else:  # Of one row: the place does not matter.
        corrections[-1] = missing
    tokenised.append(packing.Document(tokens, counted, num_bytes, corrections))
  return tokenised


def _sizes(
  segments: files.Segments, counted: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
  """The UTF-8 bytes of a text that each prediction stands for, int [n + 1].

  A prediction that counts has the bytes of predicted segments since the end of
  the previous one that counts, by the places of tokens in the text. The end has
  those after the last token. All bytes of predicted segments are thus there
  once, whatever the tokenizer does to the text.
  """
  text = "".join(text for text, _ in segments)
  codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
  widths = 1 + sum((codes >= least).astype(int) for least in _WIDER)
  is_predicted = np.repeat(
    [predicted for _, predicted in segments], [len(x) for x, _ in segments]
  )
  before = np.append(0, np.cumsum(widths * is_predicted))  # Each character.
  ends = np.append(before[tokenizer.ends(text)], before[-1])
  ends = np.maximum.accumulate(np.where(counted, ends, 0))
  return np.diff(ends, prepend=0)


_WIDER = (0x80, 0x800, 0x10000)  # First characters of two, three, four bytes.


_VERSION = 6  # Version of the cached format.


class Corpus(NamedTuple):
  """The rows of one source.

  Attributes:
    name: name of the source.
    paths: its files.
    folder: cache folder of its rows, named after the checksum of `_key`.
    job: the settings that determine the rows; where a split had no document,
      those of `preparation.fill_splits`.
    facts: the counts of `packing.pack` by split, and "documents_empty" and
      "documents_skipped".
  """

  name: str
  paths: list[str]
  folder: pathlib.Path
  job: Job
  facts: dict[str, Any]

  def num_rows(self, split: str) -> int:
    """The number of rows of a split."""
    return self.facts[split].get("rows", 0)

  def reader(self, split: str) -> Any:
    """The records of a split by position; the split must not be empty."""
    path = rows_file(self.folder, split)
    return array_record.ArrayRecordDataSource([str(path)])


def make(config: Config, source: str, *, is_test: bool = False) -> Corpus:
  """Reads and packs a source, unless its rows are in the cache.

  Args:
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
  job = Job(config, tokenizer.key, *shares)
  paths = files.find(source)
  if config.separator == SEPARATOR and any(
    files.kind_of(path) != "text" for path in paths
  ):
    job = job._replace(template=chat.of_tokenizer(config.tokenizer))
  made = _made(source, paths, job)
  if config.on_bad_document == "error" and made.facts["first_fault"]:
    raise UserError(made.facts["first_fault"])
  filled = fill_splits(job, made.facts, paths)
  return made if filled == job else _made(source, paths, filled)


def _made(source: str, paths: list[str], job: Job) -> Corpus:
  """The rows that a job makes of a source."""
  before = [_state(path) for path in paths]

  def fill(folder: pathlib.Path) -> None:
    print(f"{source}: reading, packing and caching in {folder.parent}")
    write(folder, job, source, paths)
    if [_state(path) for path in paths] != before:
      raise UserError(f"{source}: changed while it was being read; start again")

  folder = user_cache.entry("text", _key(job, paths), fill)
  facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
  return Corpus(source, paths, folder, job, facts)


def check_apart(corpora: Iterable[Corpus], test: Iterable[str]) -> None:
  """Raises UserError if a file of the test split is also trained on.

  Files are compared by content: a pattern finds test files that are beside the
  training files, and a copy has another name.

  Args:
    corpora: what is trained on.
    test: the sources of the test split.
  """
  trained = [path for one in corpora for path in one.paths]
  sizes = {path: os.path.getsize(path) for path in trained}
  for path in (path for source in test for path in files.find(source)):
    size = _state(path)[0]
    for other in (x for x in trained if size and sizes[x] == size):
      if digest(other) == digest(path):
        raise UserError(
          f"{path}: is a test file, but {other} of the training files has the"
          " same content"
        )


def digest(path: str) -> str:
  """SHA-256 of a file's content, hexadecimal; UserError if it is unreadable."""
  return _digest(path, _state(path))


def _key(job: Job, paths: Sequence[str]) -> str:
  """A checksum of the files and of every setting that affects the rows."""
  config = job.config
  settings = (
    _VERSION,
    files.CHUNK_BYTES,
    files.SECTION_BYTES,
    job.tokenizer,
    config.sequence_length,
    config.text_field,
    config.prompt_field,
    job.validation,
    job.test,
    # A file's name determines its format.
    [(digest(path), files.kind_of(path)) for path in paths],
    job.text_bytes,
    config.separator,
    config.packed,
    job.template and job.template[1:],
  )
  return hashlib.sha256(repr(settings).encode()).hexdigest()


def _state(path: str) -> tuple[int, int]:
  """A file's size and time, which change with its content."""
  try:
    state = os.stat(path)
  except OSError as error:
    raise unreadable(path, error) from None
  return state.st_size, state.st_mtime_ns


@functools.lru_cache(maxsize=4096)
def _digest(path: str, state: tuple[int, int]) -> str:
  """`digest`, cached, as every split needs the same files."""
  del state
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise unreadable(path, error) from None


Result = TypeVar("Result")
_AHEAD = 2  # Chunks queued for the processes.
# Below this size, processes take longer to start than they save.
_MIN_BYTES = 64 << 20


def in_order(
  function: Callable[[files.Chunk], Result],
  chunks: Iterable[files.Chunk],
  num_bytes: int,
) -> Iterator[Result]:
  """The result for each chunk, in the order of the chunks.

  Only a few chunks and results are in memory at a time.

  Args:
    function: a picklable function; UserErrors that it raises are raised here.
    chunks: the chunks, which this process reads.
    num_bytes: size of the files that the chunks come from. Small files are
      processed in this process.

  Raises:
    UserError: a process was killed.
  """
  num_processes = _num_cpus()
  if num_bytes < _MIN_BYTES or num_processes == 1:
    yield from map(function, chunks)
    return
  # JAX has threads in this process. Workers are therefore forked from a server
  # process that has only imported this module, and share its memory.
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__])
  with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:

    def submit(chunk: files.Chunk) -> concurrent.futures.Future[Result]:
      with _without_main():  # A pool starts its workers as work arrives.
        return pool.submit(function, chunk)

    chunks = iter(chunks)
    waiting = collections.deque(
      map(submit, itertools.islice(chunks, num_processes + _AHEAD))
    )
    try:
      while waiting:
        yield waiting.popleft().result()
        waiting.extend(map(submit, itertools.islice(chunks, 1)))
    except BrokenProcessPool:
      raise UserError(
        "a text preparation process was killed; it may have run out of memory"
      ) from None
    finally:
      for future in waiting:
        future.cancel()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
  """Processes that start in the block do not import the main module.

  It may be a user's script that calls this without a guard: each worker would
  run the script again, and wait for the lock on the cache that this process
  holds while it waits for the worker. Other threads must not pickle objects of
  the main module meanwhile.
  """
  main = sys.modules["__main__"]
  sys.modules["__main__"] = types.ModuleType("__main__")
  try:
    yield
  finally:
    sys.modules["__main__"] = main


def _num_cpus() -> int:
  """CPUs available to this process, if the system reports them (not macOS)."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
