"""Files of JSON lines, plain or compressed."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from loopjax.data.text import files
from loopjax.errors import UserError


def rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Yields ("file:line", JSON value) for every non-empty line.

  Raises:
    UserError: the file cannot be read, or a line is not JSON.
  """
  for chunk in files.read(str(path), ()):
    lines = chunk.content.split(b"\n") if chunk.kind == "jsonl" else ()
    if chunk.kind != "jsonl":
      raise UserError(
        f"{path}: expected a file name that ends with .jsonl, .jsonl.gz"
      )
    for number, line in enumerate(lines, chunk.first):
      if not line.strip():
        continue
      try:
        yield f"{path}:{number}", json.loads(line)
      except ValueError:
        raise UserError(f"{path}:{number}: is not valid JSON") from None
