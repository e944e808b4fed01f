"""Packs documents into rows of fixed length, by best fit.

A document of n tokens is n + 1 predictions: each token from those before it,
the first from the previous document's end token, and finally its own end token.
A document longer than a row is cut into pieces. The pieces are placed longest
first, each in the fullest row with enough space (best-fit decreasing), which
splits few documents and pads little (Ding et al., Fewer Truncations Improve
Language Modeling, arXiv 2404.10830).

The record of a row is, little-endian: the number of pieces (i4), the length of
each and the correction of its bytes (i4), one bit per prediction for whether it
counts, and the tokens of each piece, one more than its length. The bytes of the
tokens that count, plus the correction, make the bytes of the text that they
stand for.
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
    corrections: int [n + 1], added to the bytes of the tokens of the
      predictions that count, so that they become the bytes of the text: 0,
      unless tokens differ from the text, as with ## or after a normalisation.
  """

  tokens: np.ndarray
  counted: np.ndarray
  num_bytes: int
  corrections: np.ndarray


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
  none = np.zeros(1, np.int64)
  corrections = np.add.reduceat(
    np.concatenate([x for d in documents for x in (d.corrections, none)]),
    starts,
  )

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
    f32, UTF-8 bytes of the targets that count, exact in sum over a piece: those
    of their tokens, in proportion where tokens differ from the text.
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
    if corrections.any():
      sizes = _corrected(sizes, counted, lengths, corrections)
    num_bytes[row, :total] = sizes
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
    "documents": documents,
    "bytes": num_bytes,
  }


def _corrected(
  sizes: np.ndarray,
  counted: np.ndarray,
  lengths: np.ndarray,
  corrections: np.ndarray,
) -> np.ndarray:
  """The bytes of predictions, in proportion to those of their tokens.

  Args:
    sizes: bytes of the tokens of the predictions of pieces, int [N], 0 for
      those that do not count.
    counted: which count, bool [N]; at least one of each piece.
    lengths, corrections: of each piece.

  Returns:
    Integers of at least 0, int [N]; over a piece, their sum equals the sum of
    the sizes plus the correction.
  """
  starts = np.cumsum(lengths) - lengths
  wanted = np.add.reduceat(sizes, starts) + corrections
  sizes = sizes + 1e-6 * counted  # Tokens without bytes of their own.
  ends = np.cumsum(sizes)
  before = np.repeat(ends[starts] - sizes[starts], lengths)
  shares = (ends - before) / np.repeat(np.add.reduceat(sizes, starts), lengths)
  stops = np.rint(shares * np.repeat(wanted, lengths))
  stops += np.repeat(np.cumsum(wanted) - wanted, lengths)
  return np.diff(stops, prepend=0)


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
