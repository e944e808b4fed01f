"""Packed puzzles: those shipped with the package, and those of CSV files.

The shipped ones are in `bank.npz`. Each size of board has three arrays, named
after its boxes (`3x3_givens`): the `givens`, `answers` and (as uint16)
`ratings` of `Puzzles`.

Files of puzzles are read and checked once, packed, and memory-mapped. A file of
millions of rows is streamed in chunks. The packed result is stored in the
user's cache under the content's checksum; later runs only compute the checksum.

The first line names the columns, in any order, as Sudoku-Extreme does
(`source,question,answer,rating`) or other public files (`quizzes,solutions`;
`puzzle,solution`; `id,puzzle,solution,clues,difficulty`). Then follows one
puzzle per line: its cells in row-major order with `.` or `0` for a blank, its
solution, and if there are such columns the name of its source and its
difficulty, a non-negative number that is rounded down, or nothing. Spaces
around fields, and other columns, do not count.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from loopjax import checks
from loopjax.data import hub
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import solver, symmetry
from loopjax.data.sudoku.board import Board
from loopjax.errors import UserError, unreadable
from loopjax.run import user_cache


class Puzzles(NamedTuple):
  """N puzzles with their solutions, packed into a third of the bytes.

  A question equals its answer in the given cells and is blank elsewhere.
  Together they take 52 bytes for a 9x9 board, in memory and in files.

  Attributes:
    givens: uint8 `[N, ceil(cells / 8)]`, a bit for every cell, 1 where it is
      given; the last bits are 0.
    answers: uint8 `[N, ceil(cells / 2)]`, four bits for every cell of the
      solutions; the last half of a byte is 0.
    class_keys: uint64 `[N]`, `symmetry.class_key` of the solutions.
    ratings: int32 `[N]`, difficulty; larger is harder. The scale depends on
      the source; -1 if unknown.
    source_ids: int32 `[N]`, positions in `sources`.
    sources: the names of the puzzles' sources.
    num_skipped: number of malformed rows that were skipped.
    sha256: checksum of their file; "" for the packaged puzzles.
  """

  givens: np.ndarray
  answers: np.ndarray
  class_keys: np.ndarray
  ratings: np.ndarray
  source_ids: np.ndarray
  sources: tuple[str, ...]
  num_skipped: int = 0
  sha256: str = ""


def pack(
  board: Board, questions: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Givens, answers and class keys of uint8 boards `[N, cells]`."""
  padded = np.pad(answers, [(0, 0), (0, board.num_cells % 2)])
  return (
    np.packbits(questions != 0, axis=1),
    padded[:, 0::2] << 4 | padded[:, 1::2],
    symmetry.class_key(board, answers),
  )


def unpack(
  board: Board, givens: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Unpacked questions and answers, uint8 `[n, cells]` each."""
  halves = np.stack([answers >> 4, answers & 15], axis=2)
  cells = halves.reshape(len(answers), -1)[:, : board.num_cells]
  is_given = np.unpackbits(givens, axis=1, count=board.num_cells)
  return cells * is_given, np.ascontiguousarray(cells)


PATH = pathlib.Path(__file__).with_name("bank.npz")


def load_bank(board: Board, path: pathlib.Path = PATH) -> Puzzles:
  """Loads all puzzles of one size from the bank.

  Args:
    path: file written by `save_bank`.

  Returns:
    The puzzles, in random order; ratings are numbers of wrong guesses, as
    `solver.solve` counts them.
  """
  name = _name(board)
  try:
    with np.load(path) as arrays:
      sizes = sorted({key.split("_")[0] for key in arrays})
      if name not in sizes:
        raise UserError(
          f"{path}: no puzzles with {name} boxes; expected one of {sizes}"
        )
      givens, answers, ratings = (
        arrays[f"{name}_{part}"] for part in ("givens", "answers", "ratings")
      )
  except FileNotFoundError:
    raise UserError(
      f"{path}: the puzzle bank is missing; install the package again or run "
      f"python -m loopjax.data.sudoku.generator --out={path}"
    ) from None
  return Puzzles(
    givens=givens,
    answers=answers,
    class_keys=symmetry.class_key(board, unpack(board, givens, answers)[1]),
    ratings=ratings.astype(np.int32),
    source_ids=np.zeros(len(answers), np.int32),
    sources=("bank",),
  )


def save_bank(path: pathlib.Path, content: dict[Board, Puzzles]) -> None:
  """Writes puzzles of several sizes in the layout that `load_bank` reads.

  Args:
    path: output path.
    content: the puzzles of each size, in storage order. Ratings above 65535 are
      stored as 65535.
  """
  arrays: dict[str, Any] = {}
  for board, puzzles in content.items():
    name = _name(board)
    arrays[f"{name}_givens"] = puzzles.givens
    arrays[f"{name}_answers"] = puzzles.answers
    arrays[f"{name}_ratings"] = np.minimum(puzzles.ratings, 65535).astype(
      np.uint16
    )
  np.savez_compressed(path, **arrays)


def _name(board):
  return f"{board.box_rows}x{board.box_cols}"


# The names of the columns, by what they hold.
_NAMES = {
  "source": ("source",),
  "question": ("question", "puzzle", "quizzes"),
  "answer": ("answer", "solution", "solutions"),
  "rating": ("rating", "difficulty"),
}
_HEADER = "question (or puzzle, quizzes) and answer (or solution, solutions)"
_UNKNOWN = "unknown"  # The source of rows that name none.
_MAX_RATING = 2**31 - 1
_RATING = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


class Row(NamedTuple):
  """A row of a file.

  Attributes:
    line: the number of its line.
    source, question, answer, rating: its fields; "" for those it lacks.
    fault: why they cannot be told apart; "" if they can.
  """

  line: int
  source: str = ""
  question: str = ""
  answer: str = ""
  rating: str = ""
  fault: str = ""


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


def read_rows(path: str, file: io.BufferedReader) -> Generator[Row]:
  """Reads rows one by one, skipping empty lines.

  Args:
    path: name of the file in messages.
    file: its bytes, plain or gzip.
  """
  file.seek(0)
  packed = file.read(2) == b"\x1f\x8b"
  file.seek(0)
  content = gzip.GzipFile(fileobj=file) if packed else file
  text = io.TextIOWrapper(content, "utf-8-sig", newline="")
  # Strict: a stray quote would join rows into one, of which one is used.
  reader = csv.reader(text, strict=True, skipinitialspace=True)
  try:
    header = next((fields for fields in reader if fields), None)
    if header is None:
      raise UserError(f"{path}: the file is empty")
    places = _places(path, header)
    # Quoted fields may contain line breaks: a row starts on the line after the
    # end of the previous row.
    line = reader.line_num + 1
    for fields in reader:
      if len(fields) == len(header):
        named = {name: fields[at].strip() for name, at in places.items()}
        yield Row(line, **named)
      elif fields:
        fault = f"has {len(fields)} fields; expected {len(header)}"
        yield Row(line, fault=fault)
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
      f"{path}:{reader.line_num}: invalid CSV ({error}); correct the line;"
      " is a quote missing?"
    ) from None
  except OSError as error:
    raise unreadable(path, error) from None
  finally:
    text.detach()  # Otherwise the caller's file would be closed.


def _places(path: str, header: Sequence[str]) -> dict[str, int]:
  """The places of the columns in a row, by the fields of `Row`."""
  names = [name.strip().lower() for name in header]
  places: dict[str, int] = {}
  for field, known in _NAMES.items():
    found = [at for at, name in enumerate(names) if name in known]
    if len(found) > 1 or not found and field in ("question", "answer"):
      wrong = "several columns" if found else "no column"
      raise UserError(
        f"{path}:1: the header {','.join(header)[:80]!r} has {wrong} for the"
        f" {field}; expected {_HEADER}, and perhaps rating (or difficulty) and"
        " source"
      )
    if found:
      places[field] = found[0]
  return places


def check(board: Board, rows: Sequence[Row], check_solutions: bool) -> Checked:
  """Separates valid rows from malformed ones.

  Args:
    rows: from `read`.
    check_solutions: also check that each question has a unique solution.
  """
  question = re.compile(f"[.0-{board.size}]{{{board.num_cells}}}").fullmatch
  answer = re.compile(f"[1-{board.size}]{{{board.num_cells}}}").fullmatch
  rating = re.compile("[0-9]{0,9}").fullmatch
  faults: dict[int, str] = {}
  formed: list[Row] = []
  for row in rows:
    # Fast path: nearly all rows are well formed.
    if not (
      question(row.question) and answer(row.answer) and rating(row.rating)
    ) and (fault := row.fault or _fault_of_form(board, row)):
      faults[row.line] = fault
    else:
      formed.append(row)
  questions, answers = (
    _digits(board, [getattr(row, column) for row in formed])
    for column in ("question", "answer")
  )
  sound = np.ones(len(formed), bool)
  for i, fault in _faults(board, questions, answers, check_solutions).items():
    faults[formed[i].line] = f"{fault}; correct or remove the row"
    sound[i] = False
  valid_rows = [row for row, good in zip(formed, sound, strict=True) if good]
  return Checked(
    sources=[row.source or _UNKNOWN for row in valid_rows],
    questions=questions[sound],
    answers=answers[sound],
    ratings=np.array(
      [int(float(row.rating or "-1")) for row in valid_rows], np.int32
    ),
    faults=dict(sorted(faults.items())),
  )


def _fault_of_form(board: Board, row: Row) -> str:
  """The format error of a row; "" if there is none."""
  question, answer, rating = row.question, row.answer, row.rating
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
  if rating and not _RATING.fullmatch(rating):
    return f"the rating is {rating[:40]!r}; expected a non-negative number"
  if float(rating or 0) > _MAX_RATING:
    return f"the rating exceeds {_MAX_RATING}"
  return ""


def _digits(board: Board, cells: Sequence[str]) -> np.ndarray:
  """One column of well-formed rows as boards, uint8 `[n, cells]`."""
  text = "".join(cells).replace(".", "0")
  codes = np.frombuffer(text.encode("ascii"), np.uint8)
  return (codes - ord("0")).reshape(-1, board.num_cells)


def _faults(
  board: Board,
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


_VERSION = 2  # Version of the cached format; other versions are ignored.
_COLUMNS = {  # The arrays of `Puzzles`, one file each.
  "givens": np.uint8,
  "answers": np.uint8,
  "class_keys": np.uint64,
  "ratings": np.int32,
  "source_ids": np.int32,
}
_FACTS = "facts.json"
_YOURS = (
  "pass your own CSV files: --config.task.train_csv=FILE "
  "--config.task.test_csv=FILE"
)
_CHUNK = 16_384  # Rows held in memory as text.


def read(
  board: Board,
  path: str | os.PathLike,
  on_bad_row: str = "error",
  check_solutions: bool = False,
) -> Puzzles:
  """Reads and checks all puzzles of a file.

  Args:
    path: a file, plain or gzip regardless of its name; or
      `hf://OWNER/NAME/FILE`, downloaded from a Hugging Face Hub dataset.
    on_bad_row: "error" to stop at the first malformed row, "skip" to skip and
      count malformed rows.
    check_solutions: also check that each question has a unique solution;
      among very hard 9x9 puzzles this takes about a minute for 100,000.

  Returns:
    The puzzles in the order of the file, memory-mapped.
  """
  path = os.fspath(path)
  read_as = f"{_VERSION} {board.box_rows}x{board.box_cols} {check_solutions} "

  def checksum() -> str:
    file.seek(0)
    sha = hashlib.file_digest(file, lambda: hashlib.sha256(read_as.encode()))
    return sha.hexdigest()

  def write(folder: pathlib.Path) -> None:
    _write(folder, path, file, board, on_bad_row, check_solutions)
    if checksum() != key:
      raise UserError(f"{path}: changed while it was being read; start again")

  with _opened(path) as file:
    key = checksum()
    folder = user_cache.entry("sudoku", key, write)
  facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
  if on_bad_row == "error" and facts["first_fault"]:
    raise UserError(f"{path}:{facts['first_fault']}")
  columns = {
    name: np.asarray(np.memmap(folder / name, dtype, "r"))
    for name, dtype in _COLUMNS.items()
  }
  num = len(columns["ratings"])
  for name in ("givens", "answers"):
    columns[name] = columns[name].reshape(num, -1)
  return Puzzles(
    **columns,
    sources=tuple(facts["sources"]),
    num_skipped=facts["num_skipped"],
    sha256=key,
  )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
  local_path = (
    hub.download(path, _YOURS)
    if path.startswith(hub.PREFIX)
    else os.path.expanduser(path)
  )
  try:
    with open(local_path, "rb") as file:
      if wrong := checks.wrong_file(file.peek(64)):
        raise UserError(f"{path}: {wrong}")
      yield file
  except FileNotFoundError:
    raise UserError(
      f"{path}: no such file; expected a CSV file with columns {_HEADER}, or"
      " hf://OWNER/NAME/FILE"
    ) from None
  except IsADirectoryError:
    raise UserError(f"{path}: is a directory; expected a CSV file") from None
  except OSError as error:
    raise unreadable(path, error) from None


def _write(
  folder: pathlib.Path,
  path: str,
  file: io.BufferedReader,
  board: Board,
  on_bad_row: str,
  check_solutions: bool,
) -> None:
  """Writes the columns of a file and its metadata."""
  print(f"{path}: reading, checking and caching in {folder.parent}", flush=True)
  size = os.fstat(file.fileno()).st_size
  sources: dict[str, int] = {}
  num_kept = num_skipped = 0
  first_fault = ""
  with contextlib.ExitStack() as stack:
    outputs = [
      stack.enter_context(open(folder / name, "wb")) for name in _COLUMNS
    ]
    rows = stack.enter_context(contextlib.closing(read_rows(path, file)))
    bar = stack.enter_context(
      tqdm.tqdm(total=size, unit="B", unit_scale=True, disable=None)
    )
    while chunk := list(itertools.islice(rows, _CHUNK)):
      part = check(board, chunk, check_solutions)
      for line, fault in part.faults.items():
        first_fault = first_fault or f"{line}: {fault}"
      if first_fault and on_bad_row == "error":
        raise UserError(f"{path}:{first_fault}")
      ids = [sources.setdefault(name, len(sources)) for name in part.sources]
      packed = pack(board, part.questions, part.answers)
      columns = (*packed, part.ratings, np.array(ids, np.int32))
      for output, column in zip(outputs, columns, strict=True):
        output.write(column.tobytes())
      num_kept += len(ids)
      num_skipped += len(part.faults)
      bar.update(file.tell() - bar.n)
  if not num_kept and first_fault:
    raise UserError(f"{path}:{first_fault} (and no other row is valid)")
  if not num_kept:
    raise UserError(f"{path}:1: contains no puzzles after the header")
  (folder / _FACTS).write_text(
    json.dumps(
      {
        "sources": list(sources),
        "num_skipped": num_skipped,
        "first_fault": first_fault,
      }
    ),
    encoding="utf-8",
  )
