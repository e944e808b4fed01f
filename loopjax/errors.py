"""The one error that a user's mistake becomes."""


class UserError(ValueError):
  """A mistake of the user's: main prints one line and exits with status 2."""
