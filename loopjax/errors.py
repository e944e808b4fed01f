"""The one error type for mistakes of the user."""


class UserError(ValueError):
  """A mistake by the user: main prints one line and exits with status 2."""


def one_line(error: BaseException, length: int = 200) -> str:
  """An error's message on one line of at most `length` characters."""
  return " ".join(str(error).split())[:length]
