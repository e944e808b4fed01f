"""The one error type for mistakes of the user, and who raises it for flags."""

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn


class UserError(ValueError):
  """A mistake by the user: main prints one line and exits with status 2."""


class Parser(argparse.ArgumentParser):
  """Flags of a command, whose mistakes are reported like all others."""

  def error(self, message: str) -> NoReturn:
    """Raises UserError."""
    raise UserError(message)


def similar(name: object, known: Iterable[str]) -> str:
  """The end of a message about an unknown name: "; did you mean 'nine'?"."""
  near = difflib.get_close_matches(str(name), list(known), n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


def one_line(error: BaseException, length: int = 200) -> str:
  """An error's message on one line of at most `length` characters."""
  return " ".join(str(error).split())[:length]
