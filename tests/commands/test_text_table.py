"""Tables for a terminal."""

from loopjax.commands import document

LINES = [("run", "n"), ("a", "12"), ("long", "3")]


def test_text_is_on_the_left_and_numbers_are_on_the_right():
  assert document.aligned(LINES, 1).splitlines() == [
    "run    n", "a     12", "long   3",
  ]  # fmt: skip
  assert document.aligned(LINES).splitlines() == [
    "run   n",
    "a     12",
    "long  3",
  ]
  assert document.aligned(LINES, 0).splitlines()[1] == "   a  12"
