"""Settings of the GSM task that cannot be, and what follows from the rest."""

import pytest

from loopjax.data.gsm import config, task
from loopjax.errors import UserError


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train_ops": (0, 1)}, r"train_ops=\(0, 1\) .* from 1 to 8"),
    ({"eval_ops": (2, 9)}, r"eval_ops=\(2, 9\) .* from 1 to 8"),
    ({"eval_ops": ()}, r"eval_ops=\(\) must be distinct numbers"),
    ({"eval_ops": (2, 2)}, r"eval_ops=\(2, 2\) must be distinct numbers"),
    ({"train_ops": (2.0,)}, r"train_ops=\(2.0,\) must be"),
    ({"train_ops": 4}, "train_ops=4 must be of type tuple"),
    (
      {"context_length": 91, "min_length": 0, "max_length": 91},
      "context_length=91 is too short: .* 8 operations has 92 tokens",
    ),
    (
      {"context_length": 51, "train_ops": (2,), "eval_ops": (4,)},
      "context_length=51 is too short: .* 4 operations has 52 tokens",
    ),
    (
      {"context_length": 13_000, "max_length": 13_000},
      "max_length=13000 may need 1865 quantities, more than the 1600",
    ),
    ({"max_length": 513}, "max_length=513 is more than .*context_length=512"),
    ({"min_length": -1}, "min_length=-1 must be at least 0"),
    (
      {"min_length": 400, "max_length": 399},
      "max_length=399 must be at least 400",
    ),
    ({"reverse_fraction": 2}, "reverse_fraction=2 must be 1 at most"),
    ({"reverse_fraction": -1.0}, "reverse_fraction=-1.0 must be at least 0"),
    ({"max_constant": 9}, "max_constant=9 must be at least 10"),
    (
      {"max_constant": 300, "max_value": 200},
      "max_constant=300 is more than task.max_value=200",
    ),
    ({"max_value": 1000}, "max_value=1000 must be from 100 to 999"),
    ({"max_value": 99}, "max_value=99 must be from 100 to 999"),
    ({"num_eval_examples": 0}, "num_eval_examples=0 must be at least 1"),
    (
      {"num_eval_examples": 1602},
      r"num_eval_examples=1602 must be a multiple of 4: .*\(2, 4, 6, 8\)",
    ),
    ({"eval_seed": -1}, "eval_seed=-1 must be at least 0"),
    ({"context_length": 512.0}, "context_length=512.0 must be of type int"),
  ],
)
def test_impossible_settings_are_named(changes, message):
  with pytest.raises(UserError, match=f"^task.{message}") as error:
    task.Config(**changes)
  assert "\n" not in str(error.value)


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
