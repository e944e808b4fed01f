"""Prompts from a file of JSON lines, and their texts as JSON lines."""

import json
import pathlib
from typing import Any

from loopjax.data.text import json_lines
from loopjax.errors import UserError
from loopjax.generate.text import TextStream


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a file, each an object with a string "prompt".

  Raises:
    UserError: the file cannot be read, is empty, or a line is something else.
  """
  rows = []
  for where, row in json_lines.rows(path):
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
      raise UserError(f"{where}: needs a string 'prompt'")
    try:
      prompt.encode()
    except UnicodeEncodeError:
      raise UserError(f"{where}: its 'prompt' is not valid Unicode") from None
    rows.append(row)
  if not rows:
    raise UserError(f"{path}: contains no prompts")
  return rows


def line(row: dict[str, Any], sample: int, text: TextStream) -> str:
  """A line of JSON: the prompt's fields and its text.

  Args:
    row: the prompt's line.
    sample: the index of the text for its prompt.
    text: the text.
  """
  new = {
    "sample": sample,
    "text": text.text,
    "finish": text.finish,
    "tokens": text.costs.tokens,
    "loops": text.costs.loops,
  }
  return json.dumps(row | new, ensure_ascii=False)
