"""Keeps Orbax's log out of a run's output."""

import logging


def orbax() -> None:
  """Drops the messages of Orbax and of the event loops that it starts.

  It logs every step of a save, and repeats whatever it raises. Other messages
  pass.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
  text = logging.Formatter().format(record)  # With the traceback, if any.
  return "orbax" not in record.pathname and "orbax" not in text
