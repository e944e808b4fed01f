"""The one error type for mistakes of the user."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake by the user: main prints one line and exits with status 2."""


def similar(name: object, known: Iterable[str]) -> str:
  """The end of a message about an unknown name: "; did you mean 'nine'?"."""
  near = difflib.get_close_matches(str(name), list(known), n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


def one_line(error: BaseException, length: int = 200) -> str:
  """An error's message on one line of at most `length` characters."""
  return " ".join(str(error).split())[:length]
