"""Files of puzzles: read and checked once, packed, and memory-mapped.

A file of millions of rows is streamed in chunks. The packed result is stored in
the user's cache under the content's checksum; later runs only compute the
checksum.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import tqdm

from loopjax import checks
from loopjax.data import hub
from loopjax.data.sudoku import rows as rows_lib
from loopjax.data.sudoku.bank import Puzzles, pack
from loopjax.data.sudoku.board import Board
from loopjax.errors import UserError
from loopjax.run import user_cache

_VERSION = 1  # Version of the cached format; other versions are ignored.
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
    board: the geometry.
    path: a file, plain or gzip regardless of its name; or
      `hf://OWNER/NAME/FILE`, downloaded from a Hugging Face Hub dataset.
    on_bad_row: "error" to stop at the first malformed row, "skip" to skip and
      count malformed rows.
    check_solutions: also check that each question has a unique solution;
      among very hard 9x9 puzzles this takes about a minute for 100,000.

  Returns:
    The puzzles in the order of the file, memory-mapped.

  Raises:
    UserError: the file cannot be read or holds no puzzles, or a row is
      malformed (the message names the file and the line), or the cache cannot
      be written.
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
  facts = json.loads((folder / _FACTS).read_text())
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
      f"{path}: no such file; expected a CSV file with the header "
      f"{','.join(rows_lib.HEADER)}, or hf://OWNER/NAME/FILE"
    ) from None
  except IsADirectoryError:
    raise UserError(f"{path}: is a directory; expected a CSV file") from None
  except OSError as error:
    raise rows_lib.unreadable(path, error) from None


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
    rows = stack.enter_context(contextlib.closing(rows_lib.read(path, file)))
    bar = stack.enter_context(
      tqdm.tqdm(total=size, unit="B", unit_scale=True, disable=None)
    )
    while chunk := list(itertools.islice(rows, _CHUNK)):
      part = rows_lib.check(board, chunk, check_solutions)
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
    )
  )
