"""Settings of the GSM task that cannot be, and what follows from the rest."""

import pytest

from loopjax.data.gsm import config, task


def test_sizes():
  """10 digits, END, ANS, 17 other words, 3 x 105 of the themes, padding."""
  spec = task.spec(task.Config())
  assert (spec.sequence_length, spec.num_answer_tokens) == (516, 4)
  assert (spec.vocab_size, spec.num_padding_tokens) == (345, 1)
  assert spec.coordinates == tuple((i,) for i in range(516))


@pytest.mark.parametrize("length", [92, 512, 3300, 11_000])
def test_the_grid_has_twice_as_many_names_as_quantities(length):
  settings = config.Config(
    context_length=length, min_length=0, max_length=length
  )
  names = settings.grid_side**2
  assert names >= settings.num_names == 8 + length // 7
  if length < 5500:  # Then it is as large as it can be.
    assert 2 * settings.num_names <= names < 3 * settings.num_names
