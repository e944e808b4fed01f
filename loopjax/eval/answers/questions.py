"""Questions with known answers, and checks of generated answers."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from loopjax.data.text import files as files_lib
from loopjax.errors import UserError, needing

# Field names of the question in published files.
_QUESTION = ("question", "problem", "prompt")
# A minus after a digit or a bracket is an operator.
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")

CHECKS = "number", "math", "exact", "contains"
OF_TEXT = "exact", "contains"  # They compare text, not values.
Check = Callable[[str, str], bool]


class Question(NamedTuple):
  """A question of a file.

  Attributes:
    number: its place in the file, from 0.
    text: the question.
    answer: the correct answer; the part after "####", if present (GSM8K).
  """

  number: int
  text: str
  answer: str


def read(path: Path, limit: int = 0) -> list[Question]:
  """Reads JSON lines with a "question" (or "problem", "prompt") and "answer".

  Args:
    path: a file .jsonl or .jsonl.gz.
    limit: number of questions to read, from the start; 0 for all.

  Raises:
    UserError: the file cannot be read, or a line is not a question.
  """
  questions: list[Question] = []
  for where, row in files_lib.json_lines(path):
    if limit and len(questions) == limit:
      break
    fields = row if isinstance(row, dict) else {}
    text = next((fields[name] for name in _QUESTION if name in fields), None)
    answer = fields.get("answer")
    if not isinstance(text, str) or type(answer) not in (str, int, float):
      raise UserError(
        f"{where}: needs a string {' or '.join(map(repr, _QUESTION))} and an"
        " 'answer' (string or number)"
      )
    right = str(answer).rpartition("####")[2].strip()
    if not right:
      raise UserError(f"{where}: its answer is empty")
    questions.append(Question(len(questions), text, right))
  if not questions:
    raise UserError(f"{path}: contains no questions")
  return questions


def make_check(
  name: str, questions: Sequence[Question], ignore_case: bool = False
) -> Check:
  """A function (generated text, correct answer) -> whether they agree.

  Args:
    name: one of CHECKS. "number" compares the last number of the text, "math"
      the last mathematical expression, preferably one in \\boxed{}, by Hugging
      Face's Math-Verify; "exact" the whole text, "contains" any part of it,
      both with a single space for any white space, and none at the ends.
    questions: the questions whose answers will be checked.
    ignore_case: in "exact" and "contains", letters of either case are equal.

  Raises:
    UserError: the check cannot be used for an answer, or needs a package; or
      it has no case to ignore.
  """
  if name in OF_TEXT:
    return _text_check(name, ignore_case)
  if ignore_case:
    raise UserError(f"--ignore_case has no effect with --check={name}")
  if name == "math":
    return _math_check()
  for question in questions:
    if _NUMBER.fullmatch(question.answer) is None:
      raise UserError(
        f"question {question.number}: its answer {question.answer!r} is not a"
        " number; --check=exact and --check=contains compare text, --check=math"
        " expressions"
      )
  return _is_number


def _text_check(name: str, ignore_case: bool) -> Check:
  """Compares text, as `make_check` describes."""

  def plain(text: str) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text

  def check(text: str, answer: str) -> bool:
    normalised, right = plain(text), plain(answer)
    return normalised == right if name == "exact" else right in normalised

  return check


def _is_number(text: str, answer: str) -> bool:
  """Whether the last number of a text is the answer."""
  numbers_found = _NUMBER.findall(text)
  return bool(numbers_found) and _value(numbers_found[-1]) == _value(answer)


def _value(number: str) -> Fraction:
  return Fraction(re.sub(r"[$,]", "", number))


def _math_check() -> Check:
  """LightEval's check, which extracts and compares with Math-Verify."""
  with needing("math-verify", "math", "--check=math needs"):
    import math_verify

  def check(text: str, answer: str) -> bool:
    right = math_verify.parse(f"\\boxed{{{answer}}}")
    return math_verify.verify(right, math_verify.parse(text))

  return check
