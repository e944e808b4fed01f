"""Settings of the Depo task that cannot be, and what follows from the rest."""

import pytest

from loopjax.data.depo import config, task


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
