"""Scores of a task from log-likelihoods, by hand and for a uniform model."""

import math

import numpy as np
import pytest
from eval_examples import (
  begun,
  choices,
  ids,
  language_model_of,
  texts,
  uniform_language_model,
  write,
)

from loopjax.eval import bits_per_byte, requests
from loopjax.eval.requests import EvalItem
from loopjax.eval.scorer import Score, Scorer


def score_of(*log_probs, greedy=False):
  return Score(np.float32(log_probs), np.full(len(log_probs), greedy))


def test_a_model_without_a_clue_needs_eight_bits_a_byte(tmp_path):
  """For any prompt, length, batch and split into windows."""
  lines = texts(12)
  lines[3]["request"]["continuation"] = " é日本" * 40  # Longer than 64 tokens.
  lines[4]["request"]["context"] += "\n "  # Scored with the continuation.
  task = requests.read(write(tmp_path / "a.jsonl.gz", lines))
  scorer = Scorer(uniform_language_model(), batch_tokens=256)
  (scores,) = bits_per_byte.score([task], scorer)
  measured = bits_per_byte.measure(task.items, scores)
  summary = bits_per_byte.summarise(measured)
  assert scores[3][0].num_parts > 1
  np.testing.assert_allclose(measured["bits_per_byte"].values, 8, rtol=1e-6)
  assert summary["bits_per_byte"] == pytest.approx(8, rel=1e-6)
  assert summary["bits_per_byte_corpus"] == pytest.approx(8, rel=1e-6)
  assert summary["bits_per_byte/standard_error"] == pytest.approx(0, abs=1e-5)


def test_variants_by_hand():
  """Two answers of 3 and 10 bytes: é has two, and the space counts."""
  items = [
    EvalItem(0, ("q",), (" é",), 0, False),
    EvalItem(1, ("q",), (" is twenty",), 0, False),
  ]
  scores = [[score_of(-1.0, -2.0)], [score_of(-5.0, greedy=True)]]
  summary = bits_per_byte.summarise(bits_per_byte.measure(items, scores))
  bits = 3 / math.log(2), 5 / math.log(2)
  assert summary["n"] == 2
  assert summary["bits_per_byte"] == pytest.approx(
    (bits[0] / 3 + bits[1] / 10) / 2
  )
  assert summary["bits_per_byte_v1"] == pytest.approx(
    (bits[0] / 2 + bits[1] / 9) / 2
  )
  assert summary["bits_per_byte_corpus"] == pytest.approx(sum(bits) / 13)
  assert summary["greedy_match"] == 0.5
  # Of two, half of their difference.
  assert summary["bits_per_byte/standard_error"] == pytest.approx(
    abs(bits[0] / 3 - bits[1] / 10) / 2
  )
  # Error of a ratio of sums: weighted residuals.
  mean = summary["bits_per_byte_corpus"]
  away = bits[0] - 3 * mean, bits[1] - 10 * mean
  assert summary["bits_per_byte_corpus/standard_error"] == pytest.approx(
    math.sqrt(2 / (2 - 1)) * math.hypot(*away) / 13
  )
  assert "accuracy" not in summary


def test_accuracies_by_hand():
  """Each normalisation by length prefers a different choice."""
  texts = (" a", " a long answer", " no")
  of = [
    score_of(-3.0),  # The most likely: -1.5 per character, -3 per token.
    score_of(-2.5, -2.5),  # -5 / 14 per character, -2.5 per token.
    score_of(-1.4, -1.4, -1.4),  # -4.2 / 3 per character, -1.4 per token.
  ]
  for gold, expected in enumerate(
    ["accuracy", "accuracy_per_char", "accuracy_per_token"]
  ):
    item = EvalItem(0, ("q",) * 3, texts, gold, True)
    summary = bits_per_byte.summarise(bits_per_byte.measure([item], [of]))
    for name in ("accuracy", "accuracy_per_char", "accuracy_per_token"):
      assert summary[name] == float(name == expected), (gold, name)
    total = -of[gold].log_likelihood / math.log(2)
    num_bytes = len(texts[gold])
    assert summary["bits_per_byte"] == pytest.approx(total / num_bytes)
  assert "greedy_match" not in summary


def test_choices_are_scored_with_their_own_prompt(tmp_path):
  task = requests.read(write(tmp_path / "c.jsonl.gz", choices(3)))
  scorer = Scorer(language_model_of())
  (scores,) = bits_per_byte.score([task], scorer)
  rows = bits_per_byte.rows(task.items, scores)
  assert [(row["doc_id"], row["idx"]) for row in rows] == [
    (n, idx) for n in range(3) for idx in range(3)
  ]
  assert [row["num_bytes"] for row in rows[:3]] == [2, 2, 17]
  item = task.items[2]
  alone_request = bits_per_byte.ScoringRequest(
    begun(item.contexts[1]), ids(item.continuations[1])
  )
  (alone,) = Scorer(language_model_of())([alone_request])
  assert rows[7]["log_likelihood"] == pytest.approx(
    alone.log_likelihood, abs=1e-4
  )
