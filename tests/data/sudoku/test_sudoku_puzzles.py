"""The packaged puzzles; CSV files, every error in them, and the cache."""

import builtins
import gzip
import os
import pathlib
import sys
import types

import numpy as np
import pytest

from loopjax import errors
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import (
  generator,
  solver,
  symmetry,
  task,
)
from loopjax.data.sudoku import puzzles as puzzles_lib

BOARD = board_lib.Board(2, 2)
NUM_PUZZLES = {
  board_lib.Board(2, 2): 2000,
  board_lib.Board(2, 3): 20000,
  board_lib.Board(3, 3): 24000,
}


def boards(puzzles, board=BOARD):
  return puzzles_lib.unpack(board, puzzles.givens, puzzles.answers)


each_board = pytest.mark.parametrize("board", NUM_PUZZLES, ids=str)


def test_file_is_small():
  assert puzzles_lib.PATH.stat().st_size <= 2_000_000


@each_board
def test_all_puzzles_are_sound_and_distinct(board):
  puzzles = puzzles_lib.load_bank(board)
  num = NUM_PUZZLES[board]
  questions, answers = boards(puzzles, board)
  for cells in (questions, answers):
    assert cells.shape == (num, board.num_cells) and cells.dtype == np.uint8
  assert puzzles.ratings.shape == puzzles.source_ids.shape == (num,)
  assert puzzles.ratings.dtype == puzzles.source_ids.dtype == np.int32
  assert puzzles.sources == ("bank",) and not puzzles.source_ids.any()
  assert board_lib.is_solution(board, answers).all()
  given = questions != 0
  assert (questions == answers * given).all()
  assert len(np.unique(questions, axis=0)) == num


@each_board
def test_a_sample_has_one_solution_and_the_stored_rating(board):
  puzzles = puzzles_lib.load_bank(board)
  some = np.random.default_rng(0).choice(NUM_PUZZLES[board], 200, False)
  questions, answers = puzzles_lib.unpack(
    board, puzzles.givens[some], puzzles.answers[some]
  )
  result = solver.solve(board, questions)
  assert (result.num_solutions == 1).all()
  assert (result.solutions == answers).all()
  assert (result.guesses == puzzles.ratings[some]).all()


@each_board
def test_splits_are_large_enough_and_disjoint_up_to_symmetry(board):
  puzzles = puzzles_lib.load_bank(board)
  test = symmetry.place(puzzles.class_keys) < task.TEST_SHARE
  assert test.sum() >= (2500 if board.size > 4 else 300)
  assert (~test).sum() >= (12000 if board.size > 4 else 1000)
  keys = symmetry.class_key(board, boards(puzzles, board)[1])
  assert (keys == puzzles.class_keys).all()
  assert not np.isin(keys[test], keys[~test]).any()


def test_9x9_puzzles_are_of_all_difficulties():
  ratings = puzzles_lib.load_bank(board_lib.Board(3, 3)).ratings
  for low, high, least in ((0, 0, 4000), (1, 2, 4000), (3, 9, 4000)):
    assert ((ratings >= low) & (ratings <= high)).sum() >= least
  assert (ratings >= 10).sum() >= 1000


def test_made_saved_and_loaded(tmp_path):
  """The script's parts, for a size that is not in the puzzles_lib."""
  board = board_lib.Board(3, 2)
  rng = np.random.default_rng(0)
  made = generator.make_puzzles(board, 60, 0.5, 40, rng)
  assert len(made.ratings) == 40
  again = generator.make_puzzles(board, 60, 0.5, 40, np.random.default_rng(0))
  assert (made.givens == again.givens).all()
  path = tmp_path / "bank.npz"
  puzzles_lib.save_bank(path, {board: made})
  loaded = puzzles_lib.load_bank(board, path)
  for loaded_cells, cells in zip(
    boards(loaded, board), boards(made, board), strict=True
  ):
    assert (loaded_cells == cells).all()
  assert (loaded.ratings == made.ratings).all()


def test_odd_number_of_cells_survives_packing():
  board = board_lib.Board(3, 3)
  questions, answers = generator.generate(board, 20, np.random.default_rng(0))
  givens, packed, _ = puzzles_lib.pack(board, questions, answers)
  assert (givens.shape, packed.shape) == ((20, 11), (20, 41))
  got = puzzles_lib.unpack(board, givens, packed)
  assert (got[0] == questions).all() and (got[1] == answers).all()


def test_the_largest_ratings_are_cut(tmp_path):
  board = board_lib.Board(2, 2)
  puzzles = puzzles_lib.load_bank(board)._replace(
    ratings=np.array([70000] * 2000)
  )
  puzzles_lib.save_bank(tmp_path / "bank.npz", {board: puzzles})
  assert (
    puzzles_lib.load_bank(board, tmp_path / "bank.npz").ratings == 65535
  ).all()


def test_missing_size_and_missing_file(tmp_path):
  with pytest.raises(errors.UserError, match="no puzzles with 2x4 boxes"):
    puzzles_lib.load_bank(board_lib.Board(2, 4))
  with pytest.raises(errors.UserError, match="generator --out="):
    puzzles_lib.load_bank(board_lib.Board(3, 3), tmp_path / "none.npz")


HEADER = "source,question,answer,rating\n"
ANSWER = "1234341221434321"
QUESTION = "1..4.4.2.1.34..1"
GOOD = f"mine,{QUESTION},{ANSWER},3\n"


@pytest.fixture(autouse=True)
def kept(user_cache):
  return user_cache / "sudoku"


@pytest.fixture
def write(tmp_path):
  def write_file(content, name="puzzles.csv"):
    path = tmp_path / name
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
    return path

  return write_file


def fails(path, *parts, **options):
  """Reads a file; returns the error, one line with all these parts."""
  with pytest.raises(errors.UserError) as caught:
    puzzles_lib.read(BOARD, path, **options)
  message = str(caught.value)
  assert "\n" not in message
  for part in parts:
    assert part in message
  return message


def test_reads_plain_and_gzip_whatever_the_name(write):
  text = HEADER + GOOD + f"yours,{QUESTION.replace('.', '0')},{ANSWER},0\n"
  paths = [
    write(text, "plain.csv.gz"),
    write(gzip.compress(text.encode()), "packed.csv"),
    write(text.replace("\n", "\r\n"), "windows.csv"),
    write(b"\xef\xbb\xbf" + text.encode() + b"\n\n", "marked.csv"),
  ]
  for path in paths:
    puzzles = puzzles_lib.read(BOARD, path, check_solutions=True)
    expected = [int(c) for c in QUESTION.replace(".", "0")]
    questions, answers = boards(puzzles)
    assert questions.tolist() == [expected, expected]
    assert answers.tolist() == [[int(c) for c in ANSWER]] * 2
    assert puzzles.ratings.tolist() == [3, 0]
    assert puzzles.sources == ("mine", "yours")
    assert puzzles.source_ids.tolist() == [0, 1]
    assert puzzles.num_skipped == 0
    assert questions.dtype == answers.dtype == np.uint8
    assert puzzles.ratings.dtype == puzzles.source_ids.dtype == np.int32


def test_no_permission(write, monkeypatch):
  path = write(HEADER + GOOD)

  def refuse(*_):
    raise PermissionError(13, "Permission denied")

  # The tests may run as root.
  monkeypatch.setattr(builtins, "open", refuse)
  fails(path, f"{path}: cannot be read (Permission denied)")


PACKED = gzip.compress((HEADER + GOOD * 100).encode(), mtime=0)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (PACKED[:-9], "{path}: the gzip data is corrupt"),
    (PACKED[:-8] + bytes(8), "{path}: the gzip data is corrupt"),
    (PACKED[:20] + bytes(30) + PACKED[50:], "{path}: the gzip data is corrupt"),
    (
      (HEADER + GOOD).encode().replace(b"mi", b"m\xff"),
      "{path}: invalid UTF-8 near line 1; save it as UTF-8",
    ),
    ("", "the file is empty"),
    ("\n\n", "the file is empty"),
    (gzip.compress(b"", mtime=0), "the file is empty"),
    (HEADER, "{path}:1: contains no puzzles"),
    (
      f"source,game,answer,rating\n{GOOD}",
      "{path}:1: the header 'source,game,answer,rating' has no column for the"
      " question; expected question (or puzzle, quizzes) and answer",
    ),
    (f"puzzle,quizzes,answer,rating\n{GOOD}", "several columns for the questi"),
    (GOOD, ":1: the header"),
    ("<!DOCTYPE html>\n" + GOOD, "{path}: is a web page"),
    (HEADER + GOOD + "x" * 200000 + "\n", "{path}:3: invalid CSV"),
    # Without a check, these are one row each, of the wrong source.
    (HEADER + GOOD + f'"{GOOD}"{GOOD}', "{path}:4: invalid CSV"),
    (HEADER + GOOD + f'"{GOOD}', "is a quote missing?"),
  ],
)
def test_files_that_cannot_be_read(write, kept, content, message):
  path = write(content)
  fails(path, message.format(path=path))
  assert not any(kept.glob("[!.]*"))


def test_a_header_in_capitals_and_with_spaces(write):
  path = write("Source, Question , ANSWER,rating\n" + GOOD)
  assert len(puzzles_lib.read(BOARD, path).ratings) == 1


@pytest.mark.parametrize(
  ("text", "ratings", "source"),
  [
    (f"quizzes,solutions\n{QUESTION.replace('.', '0')},{ANSWER}\n", [-1], ""),
    (f"puzzle,solution\n{QUESTION},{ANSWER}\n", [-1], ""),
    (
      f"id,puzzle,solution,clues,difficulty\n7,{QUESTION},{ANSWER},8,2.2\n"
      f"8,{QUESTION},{ANSWER},8,0.0\n9,{QUESTION},{ANSWER},8,.9\n",
      [2, 0, 0],
      "",
    ),
    (f"rating,answer,source,question\n4,{ANSWER},me,{QUESTION}\n", [4], "me"),
    (
      f"{HEADER}me, {QUESTION} , {ANSWER}, 3 \nme,\t{QUESTION},{ANSWER},\n",
      [3, -1],
      "me",
    ),
    (f'{HEADER}"me", "{QUESTION}", "{ANSWER}", 5.\n', [5], "me"),
    (f"{HEADER},{QUESTION},{ANSWER},1\n", [1], ""),
  ],
)
def test_files_as_people_have_them(write, text, ratings, source):
  """Three of Kaggle, another order of columns, spaces, ratings or none."""
  puzzles = puzzles_lib.read(BOARD, write(text))
  questions, answers = boards(puzzles)
  expected = [int(c) for c in QUESTION.replace(".", "0")]
  assert questions.tolist() == [expected] * len(ratings)
  assert answers.tolist() == [[int(c) for c in ANSWER]] * len(ratings)
  assert puzzles.ratings.tolist() == ratings
  assert puzzles.sources == (source or "unknown",)


def test_paths_that_are_none(tmp_path):
  path = tmp_path / "none.csv"
  fails(path, f"{path}: no such file", "expected a CSV file")
  fails(tmp_path, f"{tmp_path}: is a directory")
  for path in ("hf://owner", "hf://owner/name", "hf://owner//file"):
    fails(path, "hf://OWNER/NAME/FILE")


BAD_ROWS = {
  "has 3 fields": f"mine,{QUESTION},{ANSWER}",
  "has 5 fields": f"mine,{QUESTION},{ANSWER},3,4",
  "the question has 15 cells; expected 16": f"mine,{QUESTION[1:]},{ANSWER},3",
  "the answer has 17 cells; expected 16": f"mine,{QUESTION},{ANSWER}1,3",
  "the question contains '5'": f"mine,5{QUESTION[1:]},{ANSWER},3",
  "the question contains 'é'": f"mine,é{QUESTION[1:]},{ANSWER},3",
  "the answer contains '.'": f"mine,{QUESTION},.{ANSWER[1:]},3",
  "the givens of the question contradict": f"mine,11{QUESTION[2:]},{ANSWER},3",
  "the answer is not a solution": f"mine,{QUESTION},{ANSWER[:-1]}2,3",
  "the answer contradicts": f"mine,.3{QUESTION[2:]},{ANSWER},3",
  "the rating is 'easy'": f"mine,{QUESTION},{ANSWER},easy",
  "the rating is '-1'": f"mine,{QUESTION},{ANSWER},-1",
  "the rating is 'nan'": f"mine,{QUESTION},{ANSWER},nan",
  "the rating is '²'": f"mine,{QUESTION},{ANSWER},²",
  "the rating exceeds": f"mine,{QUESTION},{ANSWER},2147483648",
}


@pytest.mark.parametrize(("message", "row"), BAD_ROWS.items(), ids=BAD_ROWS)
def test_bad_row(write, message, row):
  path = write(HEADER + GOOD + GOOD + row + "\n" + GOOD)
  fails(path, f"{path}:4: {message}")
  puzzles = puzzles_lib.read(BOARD, path, on_bad_row="skip")
  assert puzzles.num_skipped == 1
  assert puzzles.ratings.tolist() == [3, 3, 3]
  assert (boards(puzzles)[0] == boards(puzzles)[0][0]).all()
  assert puzzles.sources == ("mine",)


def test_number_of_solutions_on_request(write):
  several = f"mine,{'.' * 16},{ANSWER},0\n"
  path = write(HEADER + GOOD + several)
  assert puzzles_lib.read(BOARD, path).num_skipped == 0
  message = f"{path}:3: the question has more than one solution"
  fails(path, message, check_solutions=True)
  puzzles = puzzles_lib.read(BOARD, path, "skip", check_solutions=True)
  assert puzzles.num_skipped == 1
  path = write(HEADER + f"mine,{'.' * 16},{ANSWER[:-1]}2,0\n")
  fails(path, "the answer is not a solution", check_solutions=True)


def test_question_without_solution_contradicts_its_answer(write):
  """No answer can be valid, which is detected without solving."""
  path = write(HEADER + f"mine,123....4........,{ANSWER},0\n")
  fails(path, f"{path}:2: the answer contradicts", check_solutions=True)


def test_the_first_bad_row_is_reported(write):
  rows = list(BAD_ROWS.values())
  path = write(HEADER + GOOD + "\n" + "\n".join(rows[::-1]) + "\n")
  fails(path, f"{path}:4: the rating exceeds")
  assert puzzles_lib.read(BOARD, path, "skip").num_skipped == len(rows)


def test_lines_are_counted_across_quoted_line_breaks(write):
  path = write(HEADER + '"a\nb"' + GOOD[4:] + "bad\n")
  fails(path, f"{path}:4: has 1 fields")
  assert puzzles_lib.read(BOARD, path, "skip").sources == ("a\nb",)


def test_no_row_can_be_used(write):
  path = write(HEADER + "one\ntwo\n")
  fails(path, f"{path}:2: has 1 fields", "no other row", on_bad_row="skip")


def test_file_errors_are_not_skipped(write):
  fails(write("wrong\n" + GOOD), ":1: the header", on_bad_row="skip")


def test_board_of_another_size(write):
  with pytest.raises(errors.UserError, match="has 16 cells; expected 81"):
    puzzles_lib.read(board_lib.Board(3, 3), write(HEADER + GOOD))


def test_hub_without_the_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  fails(
    "hf://o/n/a.csv",
    "pip install 'loopjax[hub]'",
    "--config.task.train_csv=FILE",
  )


def test_hub_download_fails(monkeypatch):
  def fail(**_):
    raise OSError("no route\nto host")

  fake = types.SimpleNamespace(hf_hub_download=fail)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  fails("hf://o/n/a.csv", "no route to host", "--config.task.train_csv=FILE")


def test_hub_download(monkeypatch, write):
  asked = []

  def download(**arguments):
    asked.append(arguments)
    return str(write(HEADER + GOOD))

  fake = types.SimpleNamespace(hf_hub_download=download)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  puzzles = puzzles_lib.read(BOARD, "hf://owner/name/folder/a.csv")
  assert len(puzzles.ratings) == 1
  assert asked == [
    {
      "repo_id": "owner/name",
      "filename": "folder/a.csv",
      "repo_type": "dataset",
    }
  ]


def large(num, replaced=None):
  """A file of `num` packaged 6x6 puzzles with some lines replaced."""
  board = board_lib.Board(2, 3)
  questions, answers = boards(puzzles_lib.load_bank(board), board)
  text = [
    f"s{i % 3},{''.join(map(str, question))},{''.join(map(str, answer))},{i}"
    for i, (question, answer) in enumerate(
      zip(questions[:num].tolist(), answers[:num].tolist(), strict=True)
    )
  ]
  for line, row in (replaced or {}).items():
    text[line - 2] = row
  return board, questions, answers, HEADER + "\n".join(text) + "\n"


def test_a_file_of_many_chunks(write, monkeypatch):
  """Another board size, with a partial last chunk."""
  monkeypatch.setattr(puzzles_lib, "_CHUNK", 64)
  board, questions, answers, text = large(200)
  for path in (write(text), write(gzip.compress(text.encode()), "packed")):
    puzzles = puzzles_lib.read(board, path)
    got = boards(puzzles, board)
    assert (got[0] == questions[:200]).all()
    assert (got[1] == answers[:200]).all()
    assert puzzles.ratings.tolist() == list(range(200))
    assert puzzles.source_ids.tolist() == [i % 3 for i in range(200)]
    keys = puzzles_lib.load_bank(board).class_keys[:200]
    assert (puzzles.class_keys == keys).all()


@pytest.mark.parametrize("line", [64, 65, 66, 129, 201])
def test_a_bad_row_at_the_edge_of_a_chunk(write, monkeypatch, line):
  """The first chunk of 64 rows ends with line 65."""
  monkeypatch.setattr(puzzles_lib, "_CHUNK", 64)
  board, _, _, text = large(200, {line: "bad"})
  path = write(text)
  for _ in range(2):  # Errors are not cached.
    with pytest.raises(errors.UserError, match=f"puzzles.csv:{line}: has 1"):
      puzzles_lib.read(board, path)
  puzzles = puzzles_lib.read(board, path, "skip")
  assert puzzles.num_skipped == 1
  expected = [i for i in range(200) if i != line - 2]
  assert puzzles.ratings.tolist() == expected
  # The cache now has the result of "skip".
  with pytest.raises(errors.UserError, match=f"puzzles.csv:{line}: has 1"):
    puzzles_lib.read(board, path)


def test_a_file_is_parsed_once(write, monkeypatch, capsys):
  path = write(HEADER + GOOD)
  first = puzzles_lib.read(BOARD, path)
  assert capsys.readouterr().out.startswith(f"{path}: reading, checking and ")
  monkeypatch.setattr(puzzles_lib, "_write", None)  # Not called again.
  copy = path.rename(path.with_name("renamed.csv"))
  again = puzzles_lib.read(BOARD, copy)
  for name, column in first._asdict().items():
    np.testing.assert_array_equal(column, getattr(again, name))
  assert capsys.readouterr().out == ""


def test_what_changes_the_result_is_read_anew(write):
  several = f"mine,{'.' * 16},{ANSWER},0\n"
  path = write(HEADER + GOOD + several)
  assert len(puzzles_lib.read(BOARD, path).ratings) == 2
  fails(path, "more than one solution", check_solutions=True)
  path = write(HEADER + GOOD)
  assert len(puzzles_lib.read(BOARD, path).ratings) == 1
  with pytest.raises(errors.UserError, match="has 16 cells; expected 81"):
    puzzles_lib.read(board_lib.Board(3, 3), path)


@pytest.mark.parametrize("name", [*puzzles_lib._COLUMNS, "facts.json"])
def test_a_kept_file_that_changed_is_noticed(write, kept, name):
  path = write(HEADER + GOOD)
  # Copies, because results are memory-mapped from these files.
  expected = [np.array(column) for column in puzzles_lib.read(BOARD, path)]
  (entry,) = kept.glob("[!.]*")
  content = bytearray((entry / name).read_bytes())
  content[-1] ^= 1
  (entry / name).write_bytes(content)
  for got, column in zip(puzzles_lib.read(BOARD, path), expected, strict=True):
    np.testing.assert_array_equal(got, column)


def test_a_full_disk_is_one_line_and_leaves_nothing(write, kept, monkeypatch):
  opened = builtins.open

  def full(path, *arguments, **options):
    kept_column = pathlib.Path(path).name == "class_keys"
    return opened("/dev/full" if kept_column else path, *arguments, **options)

  path = write(HEADER + GOOD)
  monkeypatch.setattr(builtins, "open", full)
  fails(path, "cannot be written (No space left on device)", "XDG_CACHE_HOME")
  monkeypatch.setattr(builtins, "open", opened)
  assert [file.suffix for file in kept.iterdir()] == [".lock"]
  assert len(puzzles_lib.read(BOARD, path).ratings) == 1


def test_a_file_that_changes_meanwhile_is_not_kept(write, kept, monkeypatch):
  path = write(HEADER + GOOD)

  def write_and_change(*arguments):
    written(*arguments)
    path.write_text(HEADER + GOOD + GOOD)

  written = puzzles_lib._write
  monkeypatch.setattr(puzzles_lib, "_write", write_and_change)
  fails(path, f"{path}: changed while it was being")
  assert not any(kept.glob("[!.]*"))


@pytest.mark.parametrize("name", ["train", "test"])
def test_real_file(name):
  folder = os.environ.get("LOOPJAX_DATA")
  path = pathlib.Path(folder or "", "sudoku", f"{name}.csv.gz")
  if not folder or not path.exists():
    pytest.skip(f"needs LOOPJAX_DATA with sudoku/{name}.csv.gz")
  puzzles = puzzles_lib.read(board_lib.Board(3, 3), path)
  assert len(puzzles.ratings) > 1000 and puzzles.num_skipped == 0
