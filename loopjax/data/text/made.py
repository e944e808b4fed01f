"""Synthetic text, for runs without any file.

A source "made:NAME" is a file in the user's cache, created at its first use.
"""

import pathlib

import numpy as np

from loopjax.data import pipeline
from loopjax.data.arithmetic import expressions
from loopjax.errors import UserError
from loopjax.run import user_cache

PREFIX = "made:"
_VERSION = 1  # Version of the generated text.
_LINES, _IN_A_PARAGRAPH = 200_000, 40
_MODULUS, _MAX_OPERATIONS = 23, 4


def path(source: str) -> str:
  """The file of a source.

  Raises:
    UserError: the name is unknown, or the cache cannot be written.
  """
  name = source.removeprefix(PREFIX)
  if name not in _MAKERS:
    known = ", ".join(PREFIX + known for known in sorted(_MAKERS))
    raise UserError(
      f"{source}: unknown synthetic text; expected one of {known}"
    )
  key = f"{name}-{_VERSION}"

  def write(folder: pathlib.Path) -> None:
    (folder / f"{name}.txt").write_text(_MAKERS[name](), encoding="utf-8")

  return str(user_cache.entry("text_made", key, write) / f"{name}.txt")


def _arithmetic() -> str:
  """Paragraphs of lines such as `7*(3-12)=6`, modulo 23."""
  positions = np.arange(_LINES)
  stream = pipeline.stream_seed(0, 0, 0)
  drawn = pipeline.uniforms(pipeline.stream_seed(1, 0, 0), positions, 1)[:, 0]
  operations = 1 + (drawn * _MAX_OPERATIONS).astype(np.int64)
  tokens = expressions.draw(
    _MODULUS, _MAX_OPERATIONS, stream, positions, operations, "train"
  )
  values = expressions.values(_MODULUS, tokens)
  lines = [
    f"{_infix(row)}={value}"
    for row, value in zip(tokens.tolist(), values.tolist(), strict=True)
  ]
  return "\n\n".join(
    "\n".join(lines[start : start + _IN_A_PARAGRAPH])
    for start in range(0, _LINES, _IN_A_PARAGRAPH)
  )


def _infix(tokens: list[int]) -> str:
  """Converts an expression from prefix to infix notation."""
  stack: list[str] = []
  for token in reversed(tokens):
    if token < 0:
      continue
    if token < _MODULUS:
      stack.append(str(token))
      continue
    left, right = (
      f"({part})" if not part.isdecimal() else part
      for part in (stack.pop(), stack.pop())
    )
    stack.append(f"{left}{'+-*'[token - _MODULUS]}{right}")
  return stack.pop()


_MAKERS = {"arithmetic": _arithmetic}
