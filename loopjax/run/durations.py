"""Durations as text."""

_FEW_SECONDS = 10
_UNITS = (  # Seconds, name, digits.
  (365 * 86_400, "years", 0),
  (86_400, "days", 0),
  (3600, "hours", 1),
  (60, "minutes", 0),
)


def text(seconds: float) -> str:
  """A duration as text: "a few seconds", "40 s", "3 minutes", "2.5 hours"."""
  for unit, name, digits in _UNITS:
    if seconds >= 2 * unit:
      return f"{seconds / unit:,.{digits}f} {name}"
  return f"{seconds:.0f} s" if seconds >= _FEW_SECONDS else "a few seconds"
