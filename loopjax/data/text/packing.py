"""Packs documents into rows of fixed length, by best fit.

A document of n tokens is n + 1 predictions: each token from those before it,
the first from the previous document's end token, and finally its own end token.
A document longer than a row is cut into pieces. The pieces are placed longest
first, each in the fullest row with enough space (best-fit decreasing), which
splits few documents and pads little (Ding et al., Fewer Truncations Improve
Language Modeling, arXiv 2404.10830).

The record of a row is, little-endian: the number of pieces (i4), the length of
each and the correction of its bytes (i4), one bit per prediction for whether it
counts, and the tokens of each piece, one more than its length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_COUNT = np.dtype("<i4")


class Document(NamedTuple):
  """A tokenised document.

  Attributes:
    tokens: int [n + 2], between two end tokens.
    counted: bool [n + 1], which predictions count; the last does.
    num_bytes: UTF-8 bytes of the text whose predictions count.
    token_bytes: UTF-8 bytes that their tokens stand for; differs from num_bytes
      if the tokenizer normalises text.
  """

  tokens: np.ndarray
  counted: np.ndarray
  num_bytes: int
  token_bytes: int


class Packed(NamedTuple):
  """Packed documents.

  Attributes:
    records: one record per row.
    counts: counts of documents, tokens, bytes and so on, by name.
  """

  records: list[bytes]
  counts: dict[str, int]


def pack(
  documents: Sequence[Document],
  length: int,
  vocab_size: int,
  several: bool = True,
) -> Packed:
  """Packs documents into rows.

  Args:
    documents: in any order.
    length: length of a row, in predictions.
    vocab_size: V, which decides the dtype of tokens.
    several: whether pieces share rows; otherwise each has one, in order.
  """
  if not documents:
    return Packed([], {})
  dtype = token_dtype(vocab_size)
  tokens = np.concatenate(
    [d.tokens for d in documents], dtype=dtype, casting="unsafe"
  )
  between = np.zeros(1, bool)
  counted = np.concatenate([x for d in documents for x in (d.counted, between)])
  sizes = np.array([len(d.counted) for d in documents])
  num_pieces = -(-sizes // length)
  document = np.repeat(np.arange(len(documents)), num_pieces)
  place = np.arange(len(document)) - np.repeat(
    np.cumsum(num_pieces) - num_pieces, num_pieces
  )
  before = np.cumsum(sizes + 1) - (sizes + 1)  # Starts in `tokens`.
  starts = before[document] + place * length
  lengths = np.minimum(sizes[document] - place * length, length)

  wanted = np.logical_or.reduceat(counted, starts)
  # The last piece, which always counts, corrects the bytes of a document.
  corrections = np.zeros(len(document), np.int64)
  corrections[np.cumsum(num_pieces) - 1] = [
    d.num_bytes - d.token_bytes for d in documents
  ]

  starts, lengths = starts[wanted], lengths[wanted]
  header = np.stack([lengths, corrections[wanted]], axis=1)
  alone = [[piece] for piece in range(len(lengths))]
  records = _records(
    best_fit(lengths, length) if several else alone,
    tokens,
    counted,
    list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)),
    header.astype(_COUNT).tobytes(),
  )
  return Packed(
    records,
    {
      "documents": len(documents),
      "documents_cut": int((num_pieces > 1).sum()),
      "pieces_without_completion": int((~wanted).sum()),
      "tokens": int(lengths.sum()),
      "bytes": sum(d.num_bytes for d in documents),
      "padding": len(records) * length - int(lengths.sum()),
      "rows": len(records),
    },
  )


def _records(
  rows: list[list[int]],
  tokens: np.ndarray,
  counted: np.ndarray,
  spans: list[tuple[int, int]],
  header: bytes,
) -> list[bytes]:
  """The records of rows.

  Built from slices of bytes: operations on small arrays would take most of the
  packing time.

  Args:
    rows: indices of the pieces of each row.
    tokens: tokens of all documents.
    counted: which predictions of all documents count.
    spans: (start, stop) of each piece in `counted`.
    header: 8 bytes per piece.
  """
  token_bytes, mask = tokens.tobytes(), counted.tobytes()
  size = tokens.itemsize
  records = []
  for pieces in rows:
    places = [spans[piece] for piece in pieces]
    bits = b"".join([mask[start:stop] for start, stop in places])
    records.append(
      b"".join(
        [
          len(pieces).to_bytes(4, "little"),
          *[header[8 * piece : 8 * piece + 8] for piece in pieces],
          np.packbits(np.frombuffer(bits, np.uint8)).tobytes(),
          *[token_bytes[size * a : size * (b + 1)] for a, b in places],
        ]
      )
    )
  return records


def unpack(
  records: Sequence[bytes], length: int, token_bytes: np.ndarray, padding: int
) -> dict[str, np.ndarray]:
  """Reads records of rows.

  Args:
    records: records of B rows.
    length: length of a row.
    token_bytes: int [V], UTF-8 bytes that a token stands for.
    padding: id of the padding token.

  Returns:
    Arrays [B, length]: "inputs", "targets" i32; "weights" f32, 1 where a
    prediction counts; "documents" i32, 1, 2, ... and 0 for padding; "bytes"
    f32, UTF-8 bytes of the targets that count, exact in sum over a piece.
  """
  shape = (len(records), length)
  inputs = np.full(shape, padding, np.int32)
  targets = np.full(shape, padding, np.int32)
  weights = np.zeros(shape, np.float32)
  documents = np.zeros(shape, np.int32)
  num_bytes = np.zeros(shape, np.float32)
  for row, record in enumerate(records):
    num = int.from_bytes(record[:4], "little")
    header = np.frombuffer(record, _COUNT, 2 * num, 4).reshape(num, 2)
    lengths, corrections = header.T.astype(np.int64)
    total = int(lengths.sum())
    at = 4 + 8 * num
    mask_size = -(-total // 8)
    mask = np.frombuffer(record, np.uint8, mask_size, at)
    counted = np.unpackbits(mask, count=total).astype(bool)
    tokens = np.frombuffer(
      record, token_dtype(len(token_bytes)), offset=at + mask_size
    )
    ids = np.repeat(np.arange(num), lengths)
    # Each piece has one token more than predictions.
    here = np.arange(total) + ids
    inputs[row, :total] = tokens[here]
    targets[row, :total] = tokens[here + 1]
    weights[row, :total] = counted
    documents[row, :total] = ids + 1
    sizes = np.where(counted, token_bytes[tokens[here + 1]], 0)
    starts = np.cumsum(lengths) - lengths
    last = np.maximum.reduceat(np.where(counted, np.arange(total), 0), starts)
    sizes[last] += corrections
    num_bytes[row, :total] = sizes
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
    "documents": documents,
    "bytes": num_bytes,
  }


def best_fit(lengths: np.ndarray, length: int) -> list[list[int]]:
  """Assigns pieces to rows.

  Args:
    lengths: lengths of the pieces, int [pieces], from 1 to `length`.
    length: length of a row.

  Returns:
    Indices of the pieces of each row.
  """
  rows: list[list[int]] = []
  with_room: dict[int, list[int]] = {}  # Rows by number of free places.
  rooms = 0  # Bit r is set if a row has r free places.
  order = np.argsort(-lengths, kind="stable")
  for piece, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
    if fitting := rooms >> size:
      room = size + (fitting & -fitting).bit_length() - 1
      row = with_room[room].pop()
      if not with_room[room]:
        rooms ^= 1 << room
      rows[row].append(piece)
    else:
      room, row = length, len(rows)
      rows.append([piece])
    if left := room - size:
      with_room.setdefault(left, []).append(row)
      rooms |= 1 << left
  return rows


def token_dtype(num_ids: int) -> np.dtype:
  """The dtype of tokens in a record."""
  return np.dtype("<u2" if num_ids <= 1 << 16 else "<u4")
