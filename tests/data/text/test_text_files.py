"""Reading text files, errors for malformed ones, and synthetic text."""

import collections
import csv
import gzip
import io
import os
import pathlib
import struct
import sys
import tarfile
import types

import pytest
import zstandard
from tests_support import refused
from text_examples import formats, jsonl, packed_twice, sentences, table

from loopjax.data.text import config, files
from loopjax.errors import UserError

ROWS = [{"text": text, "number": n} for n, text in enumerate(sentences(50))]


@pytest.fixture
def read(tmp_path, monkeypatch):
  """Reads a file of these bytes: documents, or faults."""

  def read(
    name, content, text_field="text", prompt_field="", chunk=None, between=None
  ):
    if between is None:
      between = config.SEPARATOR
    if chunk:
      monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    path = tmp_path / name
    path.write_bytes(content)
    columns = tuple(filter(None, (prompt_field, text_field)))
    return [
      getattr(document, "segments", document)
      for part in files.read(str(path), columns)
      for document in files.documents(part, text_field, prompt_field, between)
    ]

  return read


@pytest.mark.parametrize("name", sorted(formats(ROWS)))
@pytest.mark.parametrize("chunk", [200, 1 << 20])
def test_all_formats_hold_the_same(read, name, chunk):
  found = read(name, formats(ROWS)[name], chunk=chunk)
  assert found == [[(row["text"], True)] for row in ROWS]


def pzstd(data):
  """A frame after one that readers skip, as the program of this name writes."""
  return struct.pack("<III", 0x184D2A50, 4, 0) + zstandard.compress(data)


@pytest.mark.parametrize(
  "pack", [bytes, gzip.compress, zstandard.compress, pzstd]
)
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_plain_text_is_cut_at_blank_lines(read, monkeypatch, pack, chunk):
  """No byte is lost; sections have about the intended size."""
  monkeypatch.setattr(files, "SECTION_BYTES", 100)
  text = "".join(s + "\n" * (1 + n % 3) for n, s in enumerate(sentences(80)))
  found = read("a.txt", packed_twice(text.encode(), pack), chunk=chunk)
  assert "".join(section for [(section, _)] in found) == text
  sizes = [len(section.encode()) for [(section, _)] in found]
  assert max(sizes) <= 200 and len(sizes) > 20
  if chunk > len(text):
    assert min(sizes[:-1]) >= 100
    blank = [section.endswith("\n\n") for [(section, _)] in found[:-1]]
    assert sum(blank) > 0.6 * len(blank)


@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_no_character_is_cut_where_there_are_no_lines(read, monkeypatch, chunk):
  monkeypatch.setattr(files, "SECTION_BYTES", 64)
  for word in ("日本", "\N{ROCKET}x", "é"):
    text = word * 400
    found = read("a.txt", text.encode(), chunk=chunk)
    assert "".join(section for [(section, _)] in found) == text


def test_a_table_of_text_is_read_by_its_columns(read):
  """Quotes, lines in them, empty lines, and numbers of lines in faults."""
  content = b'q,a,b\r\n14+6=,24,\r\n\r\n"x\ny, ""z""","e\n\xc3\xa9",1\r\n1,2\n'
  expected = [
    [("14+6=|", False), ("24", True)],
    [('x\ny, "z"|', False), ("e\né", True)],
  ]
  for chunk in (1, 1 << 20):
    *found, fault = read("t.csv", content, "a", "q", chunk, "|")
    assert found == expected
    assert str(fault).endswith("t.csv:7: has 2 values, but 3 columns")
  fault = read("t.tsv", b"text\tb\n\xff\tc\n")[0]
  assert str(fault).endswith("t.tsv:2: is not UTF-8; save the file as UTF-8")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_of_a_table_end_as_any_program_writes_them(read, end):
  content = end.join([b"text,b", b'"x,y",1', b"", b"z,2", b"1"]) + end
  for chunk in (1, 1 << 20):
    *found, fault = read("t.csv", content, chunk=chunk)
    assert found == [[("x,y", True)], [("z", True)]]
    assert str(fault).endswith("t.csv:5: has 1 values, but 2 columns")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"q,a\n1,2\n", "t.csv: has no column 'text', only q, a; see task.text_f"),
    (b"text,text\n1,2\n", "t.csv: two columns have the same name"),
    (b'text\n1\n"a\nb\n', "t.csv:3: is not a valid table .*a quote missing"),
    (b'text\n"' + b"a" * 1000, "t.csv:2: is not a valid table .*field limit"),
  ],
)
def test_a_bad_table_of_text_is_one_line(read, monkeypatch, content, message):
  before = csv.field_size_limit()
  monkeypatch.setattr(files, "_MAX_FIELD", 500)
  with refused(message):
    read("t.csv", content)
  assert csv.field_size_limit() == before


def test_prompts_are_read_and_completions_predicted(read):
  """The layouts of AceReason and OpenThoughts."""
  rows = [{"input": "1 + 1?", "output": "It is 2.", "category": "math"}]
  expected = [("1 + 1?\n\n", False), ("It is 2.", True)]
  assert read("a.jsonl", jsonl(rows), "output", "input") == [expected]
  for between in ("", " = "):
    assert read("a.jsonl", jsonl(rows), "output", "input", None, between) == [
      [("1 + 1?" + between, False), ("It is 2.", True)]
    ]
  turns = [
    {"from": "user", "value": "1 + 1?"},
    {"from": "assistant", "value": "It is 2."},
    {"from": "user", "value": "Thanks"},
  ]
  rows = [{"system": "Think.", "conversations": turns}]
  assert read("a.jsonl", jsonl(rows), "conversations") == [expected]
  assert read("b.parquet", table(rows), "conversations", "system") == [
    [("Think.\n\n", False), *expected]
  ]
  roles = [
    {"role": turn["from"], "content": turn["value"]} for turn in turns[:2]
  ]
  assert read("c.jsonl", jsonl([{"m": roles}]), "m") == [expected]
  alone = jsonl([{"m": roles[:1]}, {"m": []}, {"m": ""}])
  assert read("d.jsonl", alone, "m") == [[], [], []]  # Nothing to predict.


def test_turns_of_a_conversation_are_separated(read):
  """And the end of a completion is predicted."""
  said = [("user", "A?"), ("assistant", "B"), ("user", "C?"), ("gpt", "D")]
  turns = [{"from": who, "value": what} for who, what in said]
  assert read("a.json", jsonl([{"m": turns}]), "m") == [
    [("A?\n\n", False), ("B\n\n", True), ("C?\n\n", False), ("D", True)]
  ]


@pytest.mark.parametrize(
  ("line", "fault"),
  [
    (b'{"text": "\xff"}', "is not UTF-8"),
    (b'{"text": "a"', "is not valid JSON"),
    (b"[" * 100_000, "is not valid JSON"),
    (b'["text"]', "is not a JSON object"),
    (b"null", "is null; remove such rows"),
    (b'{"body": "a"}', "has no 'text', only body"),
    (b'{"text": null}', "its 'text' is null"),
    (b'{"text": 3}', "'text' is not a string"),
    (rb'{"text": "\ud800"}', "lone surrogate"),
    (b'{"text": ["a"]}', "'text': 'a' is not a turn of a conversation"),
  ],
)
def test_a_bad_line_is_named(read, line, fault):
  content = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}'
  first, bad, last = read("a.jsonl", content)
  assert (first, last) == ([("a", True)], [("b", True)])
  bad = str(bad)
  assert "a.jsonl:3: " in bad and fault in bad and "\n" not in bad


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "b.jsonl"])
def test_a_mark_of_byte_order_is_no_text(read, name):
  content = b'{"text": "a"}' if name.endswith("jsonl") else b"a"
  content = b"\xef\xbb\xbf" + content
  if name.startswith("b"):
    content = gzip.compress(content)
  assert read(name, content) == [[("a", True)]]


@pytest.mark.parametrize(("content", "said"), [
  (b"\n<!DOCTYPE html>\n<html>", "is a web page"),
  (b"<html><body>404", "is a web page"),
  (b"PK\x03\x04\x14", "is a zip archive; unpack it"),
  (b"BZh91AY", "is compressed with bzip2"),
  ("text".encode("utf-16"), "is UTF-16; save it as UTF-8"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_is_another_one_is_named(read, name, content, said):
  with pytest.raises(UserError, match=f"{name}: .*{said}"):
    read(name, content)


def test_web_pages_may_be_what_is_trained_on(read):
  page = b"<html><body>Once</body></html>"
  assert read("a.html", page) == [[(page.decode(), True)]]


@pytest.mark.parametrize(
  ("name", "pack"), [("a.jsonl", jsonl), ("a.parquet", table)]
)
def test_a_bad_row_of_a_later_chunk_has_its_number(read, name, pack):
  rows = [{**row, "text": None} if row["number"] == 30 else row for row in ROWS]
  found = read(name, pack(rows), chunk=200)
  (fault,) = (one for one in found if isinstance(one, files.Fault))
  assert f"{name}:31: " in str(fault)


def test_broken_utf8_in_plain_text_is_named(read, monkeypatch):
  monkeypatch.setattr(files, "SECTION_BYTES", 10)
  text = b"first section\n\nsecond \xe9t\xe9\n\nthird one"
  first, bad, last = read("a.txt", text)
  assert first == [("first section\n\n", True)]
  assert last == [("third one", True)]
  assert "byte 22 is not UTF-8" in str(bad)


def test_what_is_no_text_although_it_is_utf8_is_named(read):
  """A tar archive of text, and UTF-16 without its mark."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
    member = tarfile.TarInfo("a.txt")
    member.size = 5
    archive.addfile(member, io.BytesIO(b"words"))
  for content in (buffer.getvalue(), "words".encode("utf-16-le")):
    fault, *_ = read("a.txt", content)
    assert "is 0: it is not plain text" in str(fault)
  assert "byte 1 is 0" in str(fault)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
def test_a_truncated_file_is_one_line(read, name, share):
  content = formats(ROWS)[name]
  with pytest.raises(UserError, match=name) as caught:
    read(name, content[: int(share * len(content))])
  message = str(caught.value)
  assert "download it again" in message and "\n" not in message


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_damaged_file_is_one_line(read, name):
  content = bytearray(formats(ROWS)[name])
  content[20:60] = bytes(40)
  with pytest.raises(UserError, match="corrupt"):
    read(name, bytes(content))


def test_lines_of_json_come_from_a_pipe():
  """As those of --prompts=/dev/stdin, whose name says nothing."""
  here, there = os.pipe()
  with open(there, "w", encoding="utf-8") as file:
    file.write('{"prompt": "a"}\n\n{"prompt": "b"}\n')
  path = f"/dev/fd/{here}"
  try:
    (first, a), (second, b) = files.json_lines(pathlib.Path(path))
  finally:
    os.close(here)
  assert (first, second) == (f"{path}:1", f"{path}:3")
  assert (a, b) == ({"prompt": "a"}, {"prompt": "b"})


def test_a_table_without_the_column_is_one_line(read):
  with pytest.raises(UserError, match="no column 'body', only text, number"):
    read("a.parquet", table(ROWS), "body")


def test_sources(tmp_path):
  for name in ("b.txt", "a.txt", "c.md"):
    (tmp_path / name).write_text("text")
  found = files.find(f"{tmp_path}/*.txt")
  assert found == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
  assert files.find(f"{tmp_path}/c.md") == [f"{tmp_path}/c.md"]
  with pytest.raises(UserError, match="is a directory"):
    files.find(str(tmp_path))
  os.mkfifo(tmp_path / "pipe")  # As of a shell's <(zcat a.txt.gz).
  with pytest.raises(UserError, match="pipe: is a pipe or a device, which can"):
    files.find(f"{tmp_path}/pipe")
  with pytest.raises(UserError, match="no such file$"):
    files.find(f"{tmp_path}/*.jsonl")
  with pytest.raises(
    UserError, match=rf"\*.jsonl: no such file in {os.getcwd()}"
  ):
    files.find("*.jsonl")
  with pytest.raises(UserError, match="hf://OWNER/NAME/FILE"):
    files.find("hf://owner")


def test_a_file_with_a_comma_in_its_name_is_not_two(tmp_path):
  for name in ("a,b.txt", "a"):
    (tmp_path / name).write_text("text", encoding="utf-8")
  for wrong in ("a,b.txt", "a,*.txt"):
    with pytest.raises(UserError, match=r"write \? for one in a file's name"):
      config.split_sources(f"{tmp_path}/{wrong}")
  (source,) = config.split_sources(f"{tmp_path}/a?b.txt")
  assert files.find(source) == [f"{tmp_path}/a,b.txt"]
  two = f"{tmp_path}/a, {tmp_path}/a?b.txt"
  assert len(config.split_sources(two)) == 2


def test_files_of_the_hub_are_listed_and_downloaded(monkeypatch, tmp_path):
  """A pattern matches the whole path, as for local files."""
  names = ("a.txt", "data/b.txt", "data/a.txt", "data/c.md", "data/old/d.txt")

  def lists(repository, repo_type):
    assert (repository, repo_type) == ("owner/name", "dataset")
    return list(names)

  def download(repo_id, filename, repo_type):
    assert (repo_id, repo_type) == ("owner/name", "dataset")
    return str(tmp_path / filename)

  fake = types.SimpleNamespace(list_repo_files=lists, hf_hub_download=download)
  monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
  for pattern, expected in (
    ("data/*.txt", ["data/a.txt", "data/b.txt"]),
    ("*.txt", ["a.txt"]),
    ("data/[bc].*", ["data/b.txt", "data/c.md"]),
    ("data/c.md", ["data/c.md"]),
  ):
    found = files.find(f"hf://owner/name/{pattern}")
    assert found == [str(tmp_path / name) for name in expected]
  with pytest.raises(UserError, match="matches none of the dataset's 5 files"):
    files.find("hf://owner/name/*.parquet")


@pytest.mark.usefixtures("user_cache")
def test_every_line_of_arithmetic_is_right_and_few_are_alike(monkeypatch):
  monkeypatch.setattr(files, "_LINES", 2000)
  (path,) = files.find("made:arithmetic")
  text = pathlib.Path(path).read_text(encoding="utf-8")
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
  assert pathlib.Path(path).read_text(encoding="utf-8") == text


def test_text_that_nobody_makes_is_one_line():
  with pytest.raises(UserError, match="made:poems: unknown synthetic text"):
    files.find("made:poems")
