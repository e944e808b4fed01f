"""Documents in rows: nothing is lost, and documents stay separate."""

import numpy as np
import pytest

from loopjax.data.text import packing

SIZES = np.array([1, 2, 3, 1, 1, 0, 0])  # Bytes of ids 0 .. 4, END, padding.
END, PADDING = 5, 6


def document(rng, size):
  tokens = rng.integers(0, 5, size)
  counted = np.append(rng.random(size) < 0.7, True)
  framed = np.concatenate([[END], tokens, [END]])
  approximate = int(SIZES[framed[1:]][counted].sum())
  exact = approximate + int(rng.integers(-1, 2))
  return packing.Document(framed, counted, exact, approximate)


def documents(seed=0, num=60, longest=40):
  rng = np.random.default_rng(seed)
  return [document(rng, n) for n in rng.integers(0, longest, num).tolist()]


def pieces_of(rows):
  """(inputs, targets, counted, bytes) of every document in every row."""
  found = []
  for row in range(len(rows["inputs"])):
    ids = rows["documents"][row]
    assert (ids[: np.count_nonzero(ids)] > 0).all()  # Padding is at the end.
    for number in range(1, ids.max() + 1):
      here = ids == number
      found.append(
        tuple(
          rows[name][row][here]
          for name in ("inputs", "targets", "weights", "bytes")
        )
      )
    padding = ids == 0
    assert (rows["inputs"][row][padding] == PADDING).all()
    assert (rows["targets"][row][padding] == PADDING).all()
    assert not rows["weights"][row][padding].any()
    assert not rows["bytes"][row][padding].any()
  return found


@pytest.mark.parametrize("length", [4, 16, 64])
def test_every_prediction_is_there_once(length):
  """Targets, inputs, whether they count, and bytes."""
  given = documents()
  packed = packing.pack(given, length, len(SIZES))
  rows = packing.unpack(packed.records, length, SIZES, PADDING)
  expected, dropped = [], 0
  for tokens, counted, exact, _ in given:
    pieces = [
      slice(start, min(start + length, len(counted)))
      for start in range(0, len(counted), length)
    ]
    left = exact
    for piece in pieces:
      inputs, targets = tokens[:-1][piece], tokens[1:][piece]
      sizes = SIZES[targets] * counted[piece]
      if piece is pieces[-1]:
        sizes[-1] += left - sizes.sum()
      left -= sizes.sum()
      if counted[piece].any():
        expected.append((inputs, targets, counted[piece], sizes))
      else:
        dropped += 1
    assert left == 0
  key = lambda piece: [part.astype(int).tolist() for part in piece]  # noqa: E731
  got = sorted(map(key, pieces_of(rows)))
  assert got == sorted(map(key, expected))
  counts = packed.counts
  assert counts["rows"] == len(packed.records) == len(rows["inputs"])
  assert counts["documents"] == len(given)
  assert counts["documents_cut"] == sum(len(d.counted) > length for d in given)
  assert counts["pieces_without_completion"] == dropped
  assert counts["padding"] == (rows["documents"] == 0).sum()
  assert counts["tokens"] == (rows["documents"] > 0).sum()
  assert counts["bytes"] == rows["bytes"].sum() == sum(d[2] for d in given)


def test_the_fullest_row_with_room_is_taken():
  """Longest first; each in the fullest row that fits."""
  assert packing.best_fit(np.array([2, 3, 6, 5, 4, 10]), 10) == [
    [5],
    [2, 4],
    [3, 1, 0],
  ]


def test_rows_are_nearly_as_few_as_can_be():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 65, 5000)
  rows = packing.best_fit(lengths, 64)
  assert sorted(sum(rows, [])) == list(range(5000))
  assert max(lengths[row].sum() for row in rows) <= 64
  assert len(rows) <= 1.01 * np.ceil(lengths.sum() / 64)


def test_ids_of_large_vocabularies_fit():
  sizes = np.ones(70_000, int)
  tokens = np.array([69_998, 65_536, 3, 69_998])
  given = packing.Document(tokens, np.ones(3, bool), 2, 2)
  packed = packing.pack([given], 4, len(sizes))
  rows = packing.unpack(packed.records, 4, sizes, 69_999)
  assert rows["inputs"].tolist() == [[69_998, 65_536, 3, 69_999]]
  assert rows["targets"].tolist() == [[65_536, 3, 69_998, 69_999]]
