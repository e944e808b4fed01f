"""Tables for a terminal."""

from loopjax.commands import text_table

LINES = [("run", "n"), ("a", "12"), ("long", "3")]


def test_text_is_on_the_left_and_numbers_are_on_the_right():
  assert text_table.aligned(LINES, 1).splitlines() == [
    "run    n", "a     12", "long   3",
  ]  # fmt: skip
  assert text_table.aligned(LINES).splitlines() == [
    "run   n",
    "a     12",
    "long  3",
  ]
  assert text_table.aligned(LINES, 0).splitlines()[1] == "   a  12"
