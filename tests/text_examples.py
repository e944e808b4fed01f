"""Files of text for tests."""

import csv
import gzip
import io
import json

import pyarrow
import zstandard
from pyarrow import parquet

WORDS = (
  "loops", "memory", "é", "日本", "\N{ROCKET}", "a", "halting", "\n", "the",
)  # fmt: skip


def sentences(num, first=0):
  """Distinct documents, some with many bytes per character."""
  return [
    f"{n}: " + " ".join(WORDS[(n * k + k) % len(WORDS)] for k in range(n % 37))
    for n in range(first, first + num)
  ]


def jsonl(rows):
  return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def separated(rows, delimiter=","):
  """CSV or TSV, with the byte order mark that spreadsheets write."""
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, rows[0].keys(), delimiter=delimiter)
  writer.writeheader()
  writer.writerows(rows)
  return buffer.getvalue().encode("utf-8-sig")


def table(rows):
  """Parquet."""
  buffer = io.BytesIO()
  parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
  return buffer.getvalue()


def packed_twice(content, pack):
  """Two consecutive frames, as written by parallel compressors."""
  half = len(content) // 2
  return pack(content[:half]) + pack(content[half:])


def formats(rows):
  """The same rows by file name."""
  lines = jsonl(rows)
  return {
    "a.jsonl": lines,
    "a.jsonl.gz": packed_twice(lines, gzip.compress),
    "a.jsonl.zst": packed_twice(lines, zstandard.compress),
    "a.parquet": table(rows),
    "a.csv": separated(rows),
    "a.TSV.gz": gzip.compress(separated(rows, "\t")),
  }
