"""Windows, batches, and scores against one request at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eval_examples import (
  LENGTH,
  begun,
  ids,
  language_model_of,
  logits_fn,
  uniform_language_model,
)
from tests_support import array_sizes, by_size, crossing

from loopjax.errors import UserError
from loopjax.eval import scorer as scorer_lib
from loopjax.eval.scorer import Scorer, ScoringRequest, WindowBatch


def counted(context, continuation):
  tokens = np.arange(context + continuation)
  return ScoringRequest(tokens[:context], tokens[context:])


@pytest.mark.parametrize(
  ("context", "continuation"), [(1, 1), (5, 3), (1, 8), (6, 3), (30, 8)]
)
def test_a_window_keeps_the_end_of_the_context(context, continuation):
  (window,) = scorer_lib.split_windows(counted(context, continuation), 8)
  total = context + continuation
  expected = np.arange(max(0, total - 9), total)
  np.testing.assert_array_equal(window.tokens, expected)
  assert window.num_scored == continuation


@pytest.mark.parametrize("context", [1, 5, 30])
@pytest.mark.parametrize("continuation", [9, 10, 25])
def test_a_long_continuation_is_scored_in_parts(context, continuation):
  found = scorer_lib.split_windows(counted(context, continuation), 8)
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
  planned = scorer_lib.plan(lengths.tolist(), 300, 1024)
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
  planned = scorer_lib.plan(lengths.tolist(), 2048, batch_tokens)
  computed = sum(batch.num_rows * batch.length for batch in planned)
  assert 1 - lengths.sum() / computed < 0.15
  shapes = {(batch.num_rows, batch.length) for batch in planned}
  assert len(shapes) == len({batch.length for batch in planned})
  assert len(shapes) <= 4 * (np.log2(lengths.max() / lengths.min()) + 1)


def test_a_window_longer_than_a_batch_is_a_batch():
  planned = scorer_lib.plan([100, 90], 128, 64)
  assert [(b.num_rows, b.length) for b in planned] == [(1, 112), (1, 96)]
  planned = scorer_lib.plan([100, 105, 90], 128, 256)
  assert planned == [
    scorer_lib.WindowBatch(2, 112, [1, 0]),
    scorer_lib.WindowBatch(1, 96, [2]),
  ]
  assert scorer_lib.plan([], 8, 64) == []


TEXT = "The loop ends when every token has halted. Then the next one begins."
REQUESTS = [
  ScoringRequest(begun(TEXT[:context]), ids(TEXT[context : context + num]))
  for context, num in [(4, 3), (30, 9), (0, 5), (12, 1), (20, 20), (7, 30)]
]


def log_probs_of(language_model, tokens):
  """log softmax of all logits, f32 [tokens, V], for a row of this length."""
  inputs = jnp.asarray([tokens], jnp.int32)
  logits = logits_fn(language_model.graphdef, **language_model.call)(
    language_model.params, inputs
  )
  return np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32)))


def written_out(language_model, request, exact=False):
  """Log-probabilities of a continuation and argmax, from all logits.

  With `exact` the row ends with the text; otherwise it is padded to use one
  program.
  """
  tokens = np.concatenate(request)
  num = len(request.continuation)
  row = tokens[:-1] if exact else np.resize(tokens[:-1], LENGTH)
  rows = log_probs_of(language_model, row)[: len(tokens) - 1][-num:]
  picked = rows[np.arange(num), tokens[-num:]]
  return picked, rows.argmax(axis=1) == tokens[-num:]


def test_scores_are_those_of_all_logits():
  language_model = language_model_of()
  scores = Scorer(language_model, batch_tokens=128)(REQUESTS)
  for request, score in zip(REQUESTS, scores, strict=True):
    log_probs, greedy = written_out(language_model, request)
    np.testing.assert_allclose(score.log_probs, log_probs, atol=1e-4)
    np.testing.assert_array_equal(score.greedy, greedy)
    assert score.log_likelihood == pytest.approx(log_probs.sum(), abs=1e-4)
    assert score.is_greedy == greedy.all()
  # The model must distinguish tokens, or any gather would pass.
  assert np.std(np.concatenate([s.log_probs for s in scores])) > 1


# The text task rejects sleep, whose fast weights cross documents.
@pytest.mark.long
@crossing("family", by_size(["adaptive", "disco", "ponderlm", "transformer"]))
def test_padding_changes_nothing_in_any_family(family):
  language_model = language_model_of(family)
  # 42 tokens, and 47, in two rows of 48.
  request = ScoringRequest(begun(TEXT[:33]), ids(TEXT[33:42]))
  other = ScoringRequest(begun(TEXT[:40]), ids(TEXT[40:47]))
  score, _ = Scorer(language_model)([request, other])
  log_probs, greedy = written_out(language_model, request, exact=True)
  np.testing.assert_allclose(score.log_probs, log_probs, atol=1e-4)
  np.testing.assert_array_equal(score.greedy, greedy)


def test_neither_order_nor_batch_matter():
  language_model = language_model_of()
  together = Scorer(language_model, batch_tokens=256)(REQUESTS)
  backwards = Scorer(language_model, batch_tokens=256)(REQUESTS[::-1])[::-1]
  single = [
    Scorer(language_model, batch_tokens=1)([one])[0] for one in REQUESTS
  ]
  for a, b, c in zip(together, backwards, single, strict=True):
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
    np.testing.assert_allclose(a.log_probs, c.log_probs, atol=1e-5)


def test_a_greedy_continuation_is_one():
  """Greedy text of the model."""
  language_model = language_model_of()
  tokens = [256, *TEXT[:8].encode()]
  for _ in range(4):
    row = np.pad(tokens, (0, LENGTH - len(tokens)))
    best = log_probs_of(language_model, row)[len(tokens) - 1, :256].argmax()
    tokens.append(int(best))
  written = np.array(tokens)
  score, other = Scorer(language_model)(
    [
      ScoringRequest(written[:-4], written[-4:]),
      ScoringRequest(
        written[:-4], np.append(written[-4:-1], 255 - written[-1])
      ),
    ]
  )
  assert score.greedy.tolist() == [True] * 4 and score.is_greedy
  assert other.greedy.tolist() == [True] * 3 + [False]
  assert not other.is_greedy


def test_a_context_that_is_too_long_loses_its_beginning():
  language_model = language_model_of()
  tail = ids(TEXT[:40])
  long = ScoringRequest(np.concatenate([begun("x" * 100), tail]), ids(" ends."))
  tokens = np.concatenate([long.context, long.continuation])[-LENGTH - 1 :]
  log_probs = log_probs_of(language_model, tokens[:-1])[-6:]
  expected = log_probs[np.arange(6), tokens[-6:]]
  (score,) = Scorer(language_model)([long])
  np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)
  # 147 tokens, including the previous document's end token.
  assert (score.num_cut, score.num_parts) == (147 - LENGTH - 1, 1)


@pytest.mark.long
def test_a_continuation_longer_than_the_context_is_scored_in_parts():
  language_model = language_model_of()
  request = ScoringRequest(begun("Read"), ids(TEXT[:60]))
  (score,) = Scorer(language_model)([request])
  assert len(score.log_probs) == 60
  assert (score.num_cut, score.num_parts) == (0, 3)
  tokens = np.concatenate(request)
  expected = []
  # 24 tokens at a time, after as much text as fits.
  for first, last in ((5, 29), (29, 53), (53, 65)):
    row = tokens[max(0, last - 1 - LENGTH) : last]
    rows = log_probs_of(language_model, row[:-1])[first - last :]
    expected += rows[np.arange(last - first), row[first - last :]].tolist()
  np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)


def test_no_array_of_tokens_by_vocabulary():
  language_model = language_model_of()
  windows = [scorer_lib.ScoringWindow(np.arange(40), 8)] * 32
  arrays = scorer_lib.arrays_of(windows, WindowBatch(32, 48, []), padding=257)
  run = jax.jit(
    lambda params, **arrays: scorer_lib.score_tokens(
      params,
      **arrays,
      graphdef=language_model.graphdef,
      call=language_model.call,
      num_top=5,
    )
  )
  text = run.lower(language_model.params, **arrays).compile().as_text()
  assert max(array_sizes(text)) < 32 * 48 * 258 / 2


def test_a_shape_is_compiled_once():
  scorer = Scorer(language_model_of(), batch_tokens=128)
  scorer(REQUESTS)
  compiled = scorer._run._cache_size()
  scorer(REQUESTS[::-1])
  assert scorer._run._cache_size() == compiled <= 5


def test_numbers_that_are_not_finite_are_no_scores():
  language_model = language_model_of()
  params = jax.tree.map(lambda x: x * jnp.nan, language_model.params)
  with pytest.raises(UserError, match="runs/test: .* of 2 of 2 .* not finite"):
    Scorer(language_model._replace(params=params))(REQUESTS[:2])


def test_likelihoods_that_are_all_the_same_are_no_scores():
  scorer = Scorer(uniform_language_model())
  request = ScoringRequest(begun("A"), ids(" same"))
  with pytest.raises(UserError, match="runs/uniform: .* all 2 .* are -27.72"):
    scorer([request, ScoringRequest(begun("B"), ids(" same"))])
  # One request, or a repeated one, is not evidence.
  assert len(scorer([request])) == 1
  assert len(scorer([request, request])) == 2


def test_a_sum_of_many_tokens_loses_none_of_them():
  """In float32, 2**24 + 1 is 2**24."""
  score = scorer_lib.Score(np.float32([-(2**24), -1, -1]), np.ones(3, bool))
  assert score.log_likelihood == -(2**24) - 2
