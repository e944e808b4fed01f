"""Finds evaluation items in the training text, by runs of 13 words.

Words are sequences of letters and digits in lower case, as in GPT-3's
decontamination (arXiv 2005.14165, appendix C). All runs of the items are kept
in memory as 64-bit hashes; the training text is read chunk by chunk.
"""

import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.text import files, preparation
from loopjax.errors import UserError
from loopjax.run import user_cache

NUM_WORDS = 13
_VERSION = 1  # Version of the cached result.
_BETWEEN_WORDS = re.compile(r"[\W_]+")
_BASE = 0x9FB21C651E98DF25  # Odd: invertible modulo 2^64.
_BATCH = 1 << 20  # Characters hashed at a time.
_FILTER_BITS = 24
_HITS, _FACTS = "hits.npy", "facts.json"


class Items(NamedTuple):
  """The evaluation items of all overlap files.

  Attributes:
    names: names of the files.
    file: index of each item's file, int [items].
    runs: hashes of all runs of words, uint64 [runs], ascending.
    item: index of each run's item, int [runs]; items may share runs.
  """

  names: tuple[str, ...]
  file: np.ndarray
  runs: np.ndarray
  item: np.ndarray


def read_items(sources: Sequence[str]) -> Items:
  """Reads evaluation items.

  An item is a row of a file, and its texts are all strings in the row; for
  OLMES requests, those in "doc", without the prompt's few-shot examples. Rows
  with the same texts (one request per choice) are one item. In plain text,
  every section is an item.

  Raises:
    UserError: a file cannot be read, or contains a malformed row.
  """
  names = tuple(path for source in sources for path in files.find(source))
  file: list[int] = []
  runs, item = [], []
  for number, name in enumerate(names):
    seen = set()
    for chunk in files.read(name):
      for texts in _items(chunk):
        digest = hashlib.blake2b("\0".join(texts).encode()).digest()
        if digest not in seen:
          seen.add(digest)
          found = np.unique(hash_runs(texts)[0])
          runs.append(found)
          item.append(np.full(len(found), len(file)))
          file.append(number)
    if not seen:
      raise UserError(f"{name}: contains no evaluation items")
  all_runs, all_items = np.concatenate(runs), np.concatenate(item)
  order = np.argsort(all_runs, kind="stable")
  return Items(names, np.array(file), all_runs[order], all_items[order])


def count(
  corpus: preparation.Corpus, items: Items, keys: Sequence[str]
) -> tuple[np.ndarray, int]:
  """Looks up the items in the training split of a source.

  Args:
    corpus: the source.
    items: the evaluation items.
    keys: checksums of their files.

  Returns:
    Whether the source contains any run of each item, bool [items]; and the
    number of documents that contain a run of any item.
  """
  key = repr((_VERSION, NUM_WORDS, corpus.folder.name, keys))

  def write(folder: pathlib.Path) -> None:
    names = ", ".join(items.names)
    print(f"{corpus.name}: comparing with {names}", flush=True)
    hits, num_documents = np.zeros(len(items.file), bool), 0
    look = functools.partial(_look, corpus.job, np.unique(items.runs))
    chunks = preparation.chunks(corpus.job, corpus.paths)
    size = sum(pathlib.Path(path).stat().st_size for path in corpus.paths)
    for found, num in preparation.in_order(look, chunks, size):
      hits[items.item[np.isin(items.runs, found)]] = True
      num_documents += num
    np.save(folder / _HITS, hits)
    (folder / _FACTS).write_text(json.dumps(num_documents), encoding="utf-8")

  name = hashlib.sha256(key.encode()).hexdigest()
  folder = user_cache.entry("overlap", name, write)
  return np.load(folder / _HITS), json.loads(
    (folder / _FACTS).read_text(encoding="utf-8")
  )


def report(
  found: Sequence[preparation.Corpus], sources: Sequence[str], on_overlap: str
) -> dict[str, int]:
  """Compares the training split of a corpus with evaluation items.

  Args:
    found: the sources of the corpus.
    sources: sources of evaluation items.
    on_overlap: "report" prints a warning for each file with items that the
      corpus contains, "error" stops at the first.

  Returns:
    Counts: "overlap_items", items of which the corpus contains a run;
    "overlap_items_compared", items with at least one run;
    "overlap_items_short", items too short for a run; "overlap_documents",
    documents of the corpus that contain a run.

  Raises:
    UserError: as `read_items`, or because of `on_overlap`.
  """
  items = read_items(sources)
  keys = [preparation.digest(name) for name in items.names]
  hits, num_documents = np.zeros(len(items.file), bool), 0
  for one in found:
    hits_of_one, num = count(one, items, keys)
    hits |= hits_of_one
    num_documents += num
  compared = np.zeros(len(items.file), bool)
  compared[items.item] = True
  for number, name in enumerate(items.names):
    here = items.file == number
    num = int(hits[here].sum())
    message = (
      f"{name}: training data contain {NUM_WORDS} consecutive words of {num:,} "
      f"of {here.sum():,} items"
    )
    if num and on_overlap == "error":
      raise UserError(
        f"{message}; remove them from task.train_files, or set"
        " task.on_overlap=report to count them in the summary"
      )
    if num:
      print(f"warning: {message}", flush=True)
  return {
    "overlap_items": int(hits.sum()),
    "overlap_items_compared": int(compared.sum()),
    "overlap_items_short": int((~compared).sum()),
    "overlap_documents": num_documents,
  }


def hash_runs(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
  """Hashes all runs of 13 words in each text.

  The hash of a run is the polynomial hash of its words, joined by one blank,
  modulo 2^64, scrambled.

  Returns:
    Hashes, uint64 [runs]; and the index of each run's text, int [runs].
  """
  lines = [_BETWEEN_WORDS.sub(" ", text.lower()).strip() for text in texts]
  content = "\n".join(lines).encode()
  data = np.frombuffer(content, np.uint8)
  in_word = np.concatenate([[False], data > ord(" "), [False]])
  edges = np.flatnonzero(in_word[1:] != in_word[:-1])
  starts, ends = edges[::2], edges[1::2]
  text = np.cumsum(data == ord("\n"))[starts] if len(data) else starts
  first, last = slice(None, 1 - NUM_WORDS), slice(NUM_WORDS - 1, None)
  within = text[first] == text[last]
  starts, ends, text = starts[first][within], ends[last][within], text[first]
  terms = _powers(_BASE, len(data)) * data
  sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
  inverse = pow(_BASE, -1, 2**64)
  hashes = (sums[ends] - sums[starts]) * _powers(inverse, len(data))[starts]
  return pipeline.splitmix64(hashes), text[within]


@functools.lru_cache(maxsize=4)
def _all_powers(base: int, num: int) -> np.ndarray:
  """1, base, base^2, ... modulo 2^64, uint64 [num]."""
  factors = np.full(num, base, np.uint64)
  factors[:1] = 1
  return np.cumprod(factors)


def _powers(base: int, num: int) -> np.ndarray:
  """`_all_powers`, sliced from a cached table."""
  return _all_powers(base, 1 << max(num, 1).bit_length())[:num]


def _items(chunk: files.Chunk) -> Iterator[list[str]]:
  """The texts of every item of a chunk."""
  if chunk.kind == "text":
    for section in files.sections(chunk):
      if isinstance(section, files.Fault):
        raise UserError(str(section))
      yield [section]
    return
  for number, row in enumerate(files.rows(chunk), chunk.first):
    if isinstance(row, files.Fault):
      raise UserError(f"{chunk.path}:{number}: {row}")
    if isinstance(row, dict):
      row = row.get("doc", row)  # OLMES request.
    if texts := list(_strings(row)):
      yield texts


def _strings(value: Any) -> Iterator[str]:
  """All strings in a JSON value."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for inner in value.values() if isinstance(value, dict) else value:
      yield from _strings(inner)


def _look(
  job: preparation.Job, runs: np.ndarray, chunk: files.Chunk
) -> tuple[np.ndarray, int]:
  """Looks up runs in a chunk.

  Args:
    job: the settings that made the source's rows.
    runs: uint64 [runs], ascending.
    chunk: a chunk of the source.

  Returns:
    Hashes of the runs that the chunk's training documents contain, uint64; and
    the number of documents that contain one.
  """
  # No item contains most runs of a text; a table of hash prefixes rejects most
  # of them faster than a search.
  table = np.zeros(1 << _FILTER_BITS, bool)
  shift = np.uint64(64 - _FILTER_BITS)
  table[runs >> shift] = True
  found, num_documents = [], 0
  for texts in _batches(job, chunk):
    hashes, text = hash_runs(texts)
    maybe = table[hashes >> shift]
    hashes, text = hashes[maybe], text[maybe]
    is_run = np.isin(hashes, runs)
    found.append(np.unique(hashes[is_run]))
    num_documents += len(np.unique(text[is_run]))
  return np.unique(np.concatenate([runs[:0], *found])), num_documents


def _batches(job: preparation.Job, chunk: files.Chunk) -> Iterator[list[str]]:
  """The training documents of a chunk, in batches."""
  batch, size = [], 0
  for found in job.read(chunk):
    if isinstance(found, files.Fault) or not found:
      continue  # No split has malformed or empty documents.
    if (chunk.split or job.split_of(found)) == "train":
      batch.append("".join(text for text, _ in found))
      size += len(batch[-1])
    if size >= _BATCH:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch
