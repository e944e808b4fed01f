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
