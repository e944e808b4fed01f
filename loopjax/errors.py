"""The error type for users' mistakes, and an argument parser that raises it."""

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn


class UserError(ValueError):
  """A mistake by the user: main prints one line and exits with status 2."""


class Parser(argparse.ArgumentParser):
  """An argument parser that raises UserError instead of exiting."""

  def error(self, message: str) -> NoReturn:
    """Raises UserError."""
    raise UserError(message)


def similar(name: object, known: Iterable[str]) -> str:
  """A suggestion to append to a message, "; did you mean 'nine'?", or ""."""
  near = difflib.get_close_matches(str(name), list(known), n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


def one_line(error: BaseException, length: int = 200) -> str:
  """An error's message on one line of at most `length` characters."""
  return " ".join(str(error).split())[:length]
