"""The one error that a user's mistake becomes."""


class UserError(ValueError):
  """A mistake of the user's: main prints one line and exits with status 2."""


def one_line(error: BaseException, length: int = 200) -> str:
  """What an error says, on one line of at most so many characters."""
  return " ".join(str(error).split())[:length]
