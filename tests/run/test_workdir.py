"""What is read from a work directory."""

import pytest

from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib


def test_a_file_that_cannot_be_read_is_named_once(tmp_path):
  path = tmp_path / "summary.json"
  with pytest.raises(UserError) as raised:
    workdir_lib.read_json(path)
  assert str(raised.value) == (
    f"{path}: cannot be read (No such file or directory)"
  )


def test_a_file_that_cannot_be_written_leaves_none(tmp_path):
  """On a full disk, what a part of it takes would be missing."""
  (tmp_path / "a.json").mkdir()  # No file can replace it.
  with pytest.raises(IsADirectoryError):
    workdir_lib.write_json(tmp_path / "a.json", {})
  assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_tokenizer_is_kept_once(tmp_path):
  """Also one that a user put where the run keeps its own."""
  own = tmp_path / "run" / "hub" / "tokenizer.json"
  own.parent.mkdir(parents=True)
  own.write_text("{}")
  for tokenizer in (str(own), "bytes", str(tmp_path / "missing.json"), None):
    workdir_lib.keep_hub_files(None, tmp_path / "run", tokenizer)
  assert own.read_text() == "{}"
  other = tmp_path / "words.json"
  other.write_text("[]")
  assert workdir_lib.kept_tokenizer(tmp_path / "run", str(own)) == str(own)
  workdir_lib.keep_hub_files(None, tmp_path / "run", str(other))
  assert own.read_text() == "[]"
