"""Settings of the Depo task that cannot be, and what follows from the rest."""

import pytest

from loopjax.data.depo import config, task
from loopjax.errors import UserError


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"num_nodes": 76},
      "context_length=300 is too short for task.num_nodes=76: .* 304 tokens",
    ),
    ({"context_length": 299}, "context_length=299 .* task.num_nodes=75"),
    ({"max_word": 3}, "context_length=300 is too short .* 450 tokens"),
    (
      {"word_base": 8},
      "num_nodes=75 is more than the 72 words .* task.word_base=8",
    ),
    ({"num_nodes": 1, "num_queries": 1}, "num_nodes=1 must be at least 2"),
    ({"min_nodes": 1}, "min_nodes=1 must be at least 2"),
    ({"min_nodes": 80}, "min_nodes=80 is more than task.num_nodes=75"),
    ({"num_queries": 0}, "num_queries=0 must be at least 1"),
    ({"num_queries": 76}, "num_queries=76 is more than task.num_nodes=75"),
    ({"max_hops": 0}, "max_hops=0 must be at least 1"),
    ({"word_base": 0}, "word_base=0 must be at least 1"),
    ({"min_word": 0}, "min_word=0 must be at least 1"),
    ({"min_word": 3}, "min_word=3 is more than task.max_word=2"),
    ({"max_word": 6}, "max_word=6 tokens out of task.word_base=50 make more"),
    ({"num_eval_examples": 0}, "num_eval_examples=0 must be at least 1"),
    (
      {"num_eval_examples": 999},
      "num_eval_examples=999 must be a multiple of 5: .* 1, 2, 4, 8, 16 hops",
    ),
    ({"eval_seed": -1}, "eval_seed=-1 must be at least 0"),
    ({"num_nodes": 75.0}, "num_nodes=75.0 must be of type int"),
  ],
)
def test_impossible_settings_are_named(changes, message):
  with pytest.raises(UserError, match=message) as error:
    task.Config(**changes)
  assert "\n" not in str(error.value)


def test_the_papers_sizes():
  """300 + 60 tokens; 100 of words, 16 of hops, ANS, padding."""
  spec = task.spec(task.Config())
  assert (spec.sequence_length, spec.num_answer_tokens) == (360, 60)
  assert (spec.vocab_size, spec.num_padding_tokens) == (118, 1)
  assert spec.coordinates == tuple((i,) for i in range(360))
  settings = task.Config()
  assert settings.num_words == 2550
  assert (settings.first_hop, settings.answer) == (100, 116)
  assert settings.padding == 117


@pytest.mark.parametrize(
  ("max_hops", "expected"),
  [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))],
)
def test_evaluation_doubles_the_hops(max_hops, expected):
  settings = config.Config(max_hops=max_hops, num_eval_examples=120)
  assert settings.eval_hops == expected
