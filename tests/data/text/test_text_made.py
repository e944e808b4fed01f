"""Synthetic text."""

import collections
import pathlib

import pytest

from loopjax.data.text import files
from loopjax.errors import UserError


@pytest.mark.usefixtures("user_cache")
def test_every_line_of_arithmetic_is_right_and_few_are_alike(monkeypatch):
  monkeypatch.setattr(files, "_LINES", 2000)
  (path,) = files.find("made:arithmetic")
  text = pathlib.Path(path).read_text()
  paragraphs = text.split("\n\n")
  assert len(paragraphs) == 50
  lines = [line for part in paragraphs for line in part.splitlines()]
  assert len(lines) == 2000
  for line in lines:
    expression, _, value = line.partition("=")
    assert eval(expression) % 23 == int(value)
  operations = collections.Counter(
    sum(line.count(x) for x in "+-*") for line in lines
  )
  assert sorted(operations) == [1, 2, 3, 4]
  assert min(operations.values()) > 400
  assert len(set(lines)) > 1800
  assert files.find("made:arithmetic") == [path]
  assert pathlib.Path(path).read_text() == text


def test_text_that_nobody_makes_is_one_line():
  with pytest.raises(UserError, match="made:poems: unknown synthetic text"):
    files.find("made:poems")
