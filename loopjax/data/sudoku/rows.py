"""Rows of CSV files in the Sudoku-Extreme schema, and their faults.

The first line is `source,question,answer,rating`. Then follows one puzzle per
line: the name of its source, its cells in row-major order with `.` or `0` for a
blank, its solution, and its difficulty as a non-negative integer.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import solver
from loopjax.errors import UserError

HEADER = ("source", "question", "answer", "rating")
_MAX_RATING = 2**31 - 1

Row = tuple[int, list[str]]  # The number of its line, and its fields.


class Checked(NamedTuple):
  """Checked rows of a file.

  Attributes:
    sources: sources of the valid rows, [n].
    questions, answers: uint8 `[n, cells]`.
    ratings: int32 `[n]`.
    faults: descriptions of the invalid rows' faults, by line.
  """

  sources: list[str]
  questions: np.ndarray
  answers: np.ndarray
  ratings: np.ndarray
  faults: dict[int, str]


def read(path: str, file: io.BufferedReader) -> Generator[Row]:
  """Reads rows one by one, skipping empty lines.

  Args:
    path: name of the file in messages.
    file: its bytes, plain or gzip.

  Raises:
    UserError: the file cannot be read, is not CSV or has another header.
  """
  file.seek(0)
  packed = file.read(2) == b"\x1f\x8b"
  file.seek(0)
  content = gzip.GzipFile(fileobj=file) if packed else file
  text = io.TextIOWrapper(content, "utf-8-sig", newline="")
  reader = csv.reader(text)
  try:
    header = next((fields for fields in reader if fields), None)
    if header is None:
      raise UserError(f"{path}: the file is empty")
    if tuple(name.strip().lower() for name in header) != HEADER:
      raise UserError(
        f"{path}:1: the header is {','.join(header)[:80]!r}; expected "
        f"{','.join(HEADER)}"
      )
    # Quoted fields may contain line breaks: a row starts on the line after the
    # end of the previous row.
    line = reader.line_num + 1
    for fields in reader:
      if fields:
        yield line, fields
      line = reader.line_num + 1
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise UserError(
      f"{path}: the gzip data is corrupt ({error}); copy or download it again"
    ) from None
  except UnicodeDecodeError:
    raise UserError(
      f"{path}: invalid UTF-8 near line {reader.line_num + 1}; save it as UTF-8"
    ) from None
  except csv.Error as error:
    raise UserError(
      f"{path}:{reader.line_num}: invalid CSV ({error}); correct the line"
    ) from None
  except OSError as error:
    raise unreadable(path, error) from None
  finally:
    text.detach()  # Otherwise the caller's file would be closed.


def unreadable(path: str, error: OSError) -> UserError:
  """The error for a file that cannot be read."""
  return UserError(
    f"{path}: cannot be read ({error.strerror}); check its permissions"
  )


def check(
  board: board_lib.Board, rows: Sequence[Row], check_solutions: bool
) -> Checked:
  """Separates valid rows from malformed ones.

  Args:
    board: the geometry.
    rows: from `read`.
    check_solutions: also check that each question has a unique solution.
  """
  question = re.compile(f"[.0-{board.size}]{{{board.num_cells}}}").fullmatch
  answer = re.compile(f"[1-{board.size}]{{{board.num_cells}}}").fullmatch
  rating = re.compile("[0-9]{1,9}").fullmatch
  faults: dict[int, str] = {}
  formed = []
  for row in rows:
    line, fields = row
    # Fast path: nearly all rows are well formed.
    if not (
      len(fields) == 4
      and question(fields[1])
      and answer(fields[2])
      and rating(fields[3])
    ) and (fault := _fault_of_form(board, fields)):
      faults[line] = fault
    else:
      formed.append(row)
  questions, answers = (_digits(board, formed, column) for column in (1, 2))
  sound = np.ones(len(formed), bool)
  for i, fault in _faults(board, questions, answers, check_solutions).items():
    faults[formed[i][0]] = f"{fault}; correct or remove the row"
    sound[i] = False
  kept = [
    fields for (_, fields), good in zip(formed, sound, strict=True) if good
  ]
  return Checked(
    sources=[fields[0] for fields in kept],
    questions=questions[sound],
    answers=answers[sound],
    ratings=np.array([int(fields[3]) for fields in kept], np.int32),
    faults=dict(sorted(faults.items())),
  )


def _fault_of_form(board: board_lib.Board, fields: list[str]) -> str:
  """The format error of a row; "" if there is none."""
  if len(fields) != len(HEADER):
    return f"has {len(fields)} fields; expected {len(HEADER)}"
  _, question, answer, rating = fields
  cells, digits = board.num_cells, "123456789"[: board.size]
  if len(question) != cells:
    return f"the question has {len(question)} cells; expected {cells}"
  if len(answer) != cells:
    return f"the answer has {len(answer)} cells; expected {cells}"
  if stray := question.strip(".0" + digits):
    return (
      f"the question contains {stray[0]!r}; use 1 to {board.size}, and '.' or "
      "'0' for a blank"
    )
  if stray := answer.strip(digits):
    return f"the answer contains {stray[0]!r}; use 1 to {board.size}"
  if not (rating.isascii() and rating.isdigit()):
    return f"the rating is {rating[:40]!r}; expected a non-negative integer"
  if len(rating) > 10 or int(rating) > _MAX_RATING:
    return f"the rating exceeds {_MAX_RATING}"
  return ""


def _digits(
  board: board_lib.Board, rows: Sequence[Row], column: int
) -> np.ndarray:
  """One column of well-formed rows as boards, uint8 `[n, cells]`."""
  text = "".join(fields[column] for _, fields in rows).replace(".", "0")
  codes = np.frombuffer(text.encode("ascii"), np.uint8)
  return (codes - ord("0")).reshape(-1, board.num_cells)


def _faults(
  board: board_lib.Board,
  questions: np.ndarray,
  answers: np.ndarray,
  check_solutions: bool,
) -> dict[int, str]:
  """The first rule of Sudoku that each invalid row breaks, by row."""
  wrong = ~board_lib.is_solution(board, answers)
  differs = ((questions != answers) & (questions != 0)).any(axis=1)
  bad = np.flatnonzero(wrong | differs)
  faults = {}
  for i, clash in zip(
    bad, board_lib.clashes(board, questions[bad]), strict=True
  ):
    if clash:
      faults[int(i)] = "the givens of the question contradict each other"
    elif wrong[i]:
      faults[int(i)] = "the answer is not a solution"
    else:
      faults[int(i)] = "the answer contradicts the givens of the question"
  if check_solutions:
    # A valid answer is one solution; checks that there is no other.
    sound = np.flatnonzero(~(wrong | differs))
    several = solver.solve(board, questions[sound]).num_solutions > 1
    for i in sound[several]:
      faults[int(i)] = "the question has more than one solution"
  return faults
