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
