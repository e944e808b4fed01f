"""Windows score every token once, and batches hold every window once."""

import numpy as np
import pytest

from loopjax.eval import scorer
from loopjax.eval.scorer import ScoringRequest


def request(context, continuation):
  tokens = np.arange(context + continuation)
  return ScoringRequest(tokens[:context], tokens[context:])


@pytest.mark.parametrize(
  ("context", "continuation"), [(1, 1), (5, 3), (1, 8), (6, 3), (30, 8)]
)
def test_a_window_keeps_the_end_of_the_context(context, continuation):
  (window,) = scorer.split_windows(request(context, continuation), 8)
  total = context + continuation
  expected = np.arange(max(0, total - 9), total)
  np.testing.assert_array_equal(window.tokens, expected)
  assert window.num_scored == continuation


@pytest.mark.parametrize("context", [1, 5, 30])
@pytest.mark.parametrize("continuation", [9, 10, 25])
def test_a_long_continuation_is_scored_in_parts(context, continuation):
  found = scorer.split_windows(request(context, continuation), 8)
  scored = np.concatenate([w.tokens[-w.num_scored :] for w in found])
  np.testing.assert_array_equal(
    scored, np.arange(context, context + continuation)
  )
  for window in found:
    assert window.num_scored < len(window.tokens) <= 9
    # As much preceding text as fits.
    first = window.tokens[0]
    assert first == 0 or len(window.tokens) == 9
    assert window.num_scored <= 4


def test_every_window_is_in_one_batch_that_holds_it():
  lengths = np.random.default_rng(0).integers(1, 300, 500)
  planned = scorer.plan(lengths.tolist(), 300, 1024)
  members = [i for batch in planned for i in batch.members]
  assert sorted(members) == list(range(500))
  for batch in planned:
    assert len(batch.members) <= batch.num_rows
    assert max(lengths[batch.members]) <= batch.length <= 300
    assert batch.num_rows * batch.length <= 1024


@pytest.mark.parametrize("num", [60, 500, 5000])
@pytest.mark.parametrize("batch_tokens", [2048, 8192])
def test_little_is_padding_and_few_programs_are_compiled(num, batch_tokens):
  """Lengths like those of questions: most similar, some much longer."""
  generator = np.random.default_rng(0)
  lengths = 20 + generator.lognormal(np.log(120), 0.6, num).astype(int)
  planned = scorer.plan(lengths.tolist(), 2048, batch_tokens)
  computed = sum(batch.num_rows * batch.length for batch in planned)
  assert 1 - lengths.sum() / computed < 0.15
  shapes = {(batch.num_rows, batch.length) for batch in planned}
  assert len(shapes) == len({batch.length for batch in planned})
  assert len(shapes) <= 4 * (np.log2(lengths.max() / lengths.min()) + 1)


def test_a_window_longer_than_a_batch_is_a_batch():
  planned = scorer.plan([100, 90], 128, 64)
  assert [(b.num_rows, b.length) for b in planned] == [(1, 112), (1, 96)]
  planned = scorer.plan([100, 105, 90], 128, 256)
  assert planned == [
    scorer.WindowBatch(2, 112, [1, 0]),
    scorer.WindowBatch(1, 96, [2]),
  ]
  assert scorer.plan([], 8, 64) == []
