"""Reads puzzles from CSV files in the Sudoku-Extreme schema.

The first line is `source,question,answer,rating`. Then follows one puzzle per
line: the name of where it comes from, its cells in row-major order with `.` or
`0` for a blank, its solution, and its difficulty as a non-negative integer.
"""

import csv
import gzip
import io
import os
import pathlib
import zlib

import numpy as np

from loopjax import errors
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import solver

HEADER = ("source", "question", "answer", "rating")

_HUB = "hf://"
_MAX_RATING = 2**31 - 1


def read_csv(
  board: board_lib.Board,
  path: str | os.PathLike,
  on_bad_row: str = "error",
  check_solutions: bool = False,
) -> board_lib.Puzzles:
  """Reads and checks all puzzles of a file.

  Args:
    board: the geometry.
    path: a file, plain or gzip whatever its name; or `hf://OWNER/NAME/FILE`, a
      file of a dataset on the Hugging Face Hub, which is downloaded.
    on_bad_row: "error" to stop at the first malformed row, "skip" to leave
      malformed rows out and count them.
    check_solutions: also check that each question has one solution only;
      among very hard 9x9 puzzles this takes about a minute for 100,000.

  Returns:
    The puzzles, in the order of the file.

  Raises:
    errors.UserError: the file cannot be read or holds no puzzles, or a row is
      malformed. The message names the file and the line.
  """
  if on_bad_row not in ("error", "skip"):
    raise errors.UserError(
      f"on_bad_row={on_bad_row!r} is neither 'error' nor 'skip'"
    )
  path = os.fspath(path)
  local_path = _download(path) if path.startswith(_HUB) else path
  rows, lines = _parse(path, _read_text(local_path))
  faults = np.full(len(rows), "", object)
  _check_fields(board, rows, faults)
  formed = np.flatnonzero(faults == "")
  questions, answers, ratings = _arrays(board, rows, formed)
  faults[formed] = _board_faults(board, questions, answers, check_solutions)
  _raise_for(path, lines, faults, on_bad_row)
  kept = faults[formed] == ""
  names = [rows[i][0] for i in formed[kept].tolist()]
  sources, source_ids = np.unique(np.array(names, str), return_inverse=True)
  return board_lib.Puzzles(
    questions=questions[kept],
    answers=answers[kept],
    ratings=ratings[kept],
    sources=tuple(sources.tolist()),
    source_ids=source_ids.astype(np.int32),
    num_skipped=len(rows) - len(names),
  )


def _download(url):
  """Downloads a file of a dataset and returns the path of the copy."""
  parts = url.removeprefix(_HUB).split("/", 2)
  if len(parts) < 3 or not all(parts):
    raise errors.UserError(f"{url}: write it as {_HUB}OWNER/NAME/FILE")
  owner, name, filename = parts
  try:
    import huggingface_hub
  except ImportError:
    raise errors.UserError(
      f"{url}: needs the package huggingface_hub; install it with pip install "
      "huggingface_hub, or give the path of a local CSV file instead"
    ) from None
  try:
    return huggingface_hub.hf_hub_download(
      repo_id=f"{owner}/{name}", filename=filename, repo_type="dataset"
    )
  except Exception as error:  # Any of the network's or of the library's.
    reason = " ".join(str(error).split())[:200]
    raise errors.UserError(
      f"{url}: the download failed ({type(error).__name__}: {reason}); check "
      "the name and the network, or give the path of a local CSV file instead"
    ) from error


def _read_text(path):
  """The decompressed text of a file."""
  try:
    content = pathlib.Path(path).read_bytes()
    if content.startswith(b"\x1f\x8b"):
      content = gzip.decompress(content)
    return content.decode("utf-8-sig")
  except FileNotFoundError:
    raise errors.UserError(
      f"{path}: no such file; give the path of a CSV file with the header "
      f"{','.join(HEADER)}, or hf://OWNER/NAME/FILE"
    ) from None
  except IsADirectoryError:
    raise errors.UserError(
      f"{path}: is a directory; give the path of a CSV file in it"
    ) from None
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise errors.UserError(
      f"{path}: the gzip data is corrupt ({error}); copy or download it again"
    ) from None
  except OSError as error:
    raise errors.UserError(
      f"{path}: cannot be read ({error.strerror}); check its permissions"
    ) from None
  except UnicodeDecodeError as error:
    raise errors.UserError(
      f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
    ) from None


def _parse(path, text):
  """Splits into rows; returns them and the numbers of their lines."""
  if not text.strip():
    raise errors.UserError(f"{path}: the file is empty; it needs puzzles")
  reader = csv.reader(io.StringIO(text, newline=""))
  rows, lines = [], []
  try:
    header = next(reader)
    if tuple(header) != HEADER:
      raise errors.UserError(
        f"{path}:1: the header is {','.join(header)[:80]!r}; it must be "
        f"{','.join(HEADER)}"
      )
    # A field in quotes may hold line breaks: a row starts on the line after
    # the one where the row before it ended.
    start = reader.line_num + 1
    for row in reader:
      if row:  # Empty lines, such as at the end, are no rows.
        rows.append(row)
        lines.append(start)
      start = reader.line_num + 1
  except csv.Error as error:
    raise errors.UserError(
      f"{path}:{reader.line_num}: is not valid CSV ({error}); correct the line"
    ) from None
  if not rows:
    raise errors.UserError(
      f"{path}:1: there are no puzzles after the header; add some"
    )
  return rows, np.array(lines)


def _check_fields(board, rows, faults):
  """Writes into `faults` what is wrong with the form of a row."""
  cells = board.num_cells
  digits = "123456789"[: board.size]
  # Deleting the allowed characters leaves the stray ones, at C speed.
  no_clues = str.maketrans("", "", ".0" + digits)
  no_digits = str.maketrans("", "", digits)
  for i, row in enumerate(rows):
    if len(row) != len(HEADER):
      faults[i] = f"has {len(row)} fields; it must have {len(HEADER)}"
      continue
    _, question, answer, rating = row
    if len(question) != cells:
      faults[i] = f"the question has {len(question)} cells; write {cells}"
    elif len(answer) != cells:
      faults[i] = f"the answer has {len(answer)} cells; write {cells}"
    elif stray := question.translate(no_clues):
      faults[i] = (
        f"the question holds {stray[0]!r}; use 1 to {board.size}, and '.' or "
        "'0' for a blank"
      )
    elif stray := answer.translate(no_digits):
      faults[i] = f"the answer holds {stray[0]!r}; use 1 to {board.size}"
    elif not (rating.isascii() and rating.isdigit()):
      faults[i] = f"the rating is {rating[:40]!r}; use a non-negative integer"
    elif len(rating) > 10 or int(rating) > _MAX_RATING:
      faults[i] = f"the rating is above {_MAX_RATING}; use a smaller one"


def _arrays(board, rows, formed):
  """Turns the well-formed rows into questions, answers and ratings."""
  chosen = [rows[i] for i in formed.tolist()]

  def digits(column):
    text = "".join(row[column] for row in chosen).replace(".", "0")
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    return (codes - ord("0")).reshape(-1, board.num_cells)

  ratings = np.array([int(row[3]) for row in chosen], np.int32)
  return digits(1), digits(2), ratings


def _board_faults(board, questions, answers, check_solutions):
  """Says of each puzzle which rule of Sudoku it breaks first, if any."""
  differs = ((questions != answers) & (questions != 0)).any(axis=1)
  checks = [
    (board_lib.clashes(board, questions), "the givens of the question clash"),
    (~board_lib.is_solution(board, answers), "the answer is not a solution"),
    (differs, "the answer contradicts the givens of the question"),
  ]
  if check_solutions:
    # A sound answer is one solution; what remains to be seen is another one.
    sound = np.flatnonzero(~np.any([bad for bad, _ in checks], axis=0))
    several = np.zeros(len(questions), bool)
    several[sound] = solver.solve(board, questions[sound]).num_solutions > 1
    checks.append((several, "the question has several solutions"))
  faults = np.full(len(questions), "", object)
  for bad, message in reversed(checks):
    faults[bad] = f"{message}; correct or remove the row"
  return faults


def _raise_for(path, lines, faults, on_bad_row):
  """Raises for the first faulty row, or only if no row can be used."""
  faulty = np.flatnonzero(faults != "")
  if not len(faulty) or (on_bad_row == "skip" and len(faulty) < len(faults)):
    return
  message = f"{path}:{lines[faulty[0]]}: {faults[faulty[0]]}"
  if on_bad_row == "skip":
    message += " (and no other row can be used)"
  raise errors.UserError(message)
