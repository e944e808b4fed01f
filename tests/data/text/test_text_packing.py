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
  exact = rng.integers(0, 4, size + 1) * counted
  corrections = exact - SIZES[framed[1:]] * counted
  if rng.random() < 0.3:  # Tokens are the text.
    corrections = np.zeros(size + 1, int)
    exact = SIZES[framed[1:]] * counted
  return packing.Document(framed, counted, int(exact.sum()), corrections)


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
  for tokens, counted, exact, corrections in given:
    pieces = [
      slice(start, min(start + length, len(counted)))
      for start in range(0, len(counted), length)
    ]
    left = exact
    for piece in pieces:
      inputs, targets = tokens[:-1][piece], tokens[1:][piece]
      sizes = SIZES[targets] * counted[piece]
      total = sizes.sum() + corrections[piece].sum()
      left -= total
      if counted[piece].any():
        expected.append((inputs, targets, counted[piece], total))
      else:
        assert total == 0
        dropped += 1
    assert left == 0
  key = lambda piece: [part.astype(int).tolist() for part in piece]  # noqa: E731
  ours = []
  for inputs, targets, counts, sizes in pieces_of(rows):
    assert (sizes >= 0).all() and not sizes[counts == 0].any()
    ours.append((inputs, targets, counts, sizes.sum()))
  got = sorted(map(key, ours))
  assert got == sorted(map(key, expected))
  counts = packed.counts
  assert counts["rows"] == len(packed.records) == len(rows["inputs"])
  assert counts["documents"] == len(given)
  assert counts["documents_cut"] == sum(len(d.counted) > length for d in given)
  assert counts["pieces_without_completion"] == dropped
  assert counts["padding"] == (rows["documents"] == 0).sum()
  assert counts["tokens"] == (rows["documents"] > 0).sum()
  assert counts["bytes"] == rows["bytes"].sum() == sum(d[2] for d in given)


def test_bytes_are_those_of_tokens_or_in_proportion():
  """Three bytes too few, beside a document whose tokens are its text."""
  given = [
    packing.Document(
      np.array([END, *tokens, END]), np.array(counted), total,
      np.array(corrections),
    )
    for tokens, counted, total, corrections in (
      ([1, 2], [True] * 3, 5, [0, 0, 0]),
      ([2, 2, 0], [True, False, True, True], 8, [4, 0, 0, 0]),
      ([5], [True, True], 7, [3, 4]),
    )
  ]  # fmt: skip
  packed = packing.pack(given, 9, len(SIZES))
  rows = packing.unpack(packed.records, 9, SIZES, PADDING)
  found = {len(sizes): sizes.tolist() for *_, sizes in pieces_of(rows)}
  assert found[3] == [2, 3, 0]
  assert found[4] == [6, 0, 2, 0]  # As 3 to 1.
  assert sum(found[2]) == 7 and min(found[2]) >= 0  # Tokens without bytes.


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
  given = packing.Document(tokens, np.ones(3, bool), 2, np.zeros(3, int))
  packed = packing.pack([given], 4, len(sizes))
  rows = packing.unpack(packed.records, 4, sizes, 69_999)
  assert rows["inputs"].tolist() == [[69_998, 65_536, 3, 69_999]]
  assert rows["targets"].tolist() == [[65_536, 3, 69_998, 69_999]]
