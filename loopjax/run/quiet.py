"""Keeps Orbax's log apart from what a run says."""

import logging


def orbax() -> None:
  """Drops Orbax's messages, and those of the event loops that it starts.

  It reports every step of a save, and again whatever it raises. Messages of
  others are let through.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
  text = logging.Formatter().format(record)  # With the traceback, if any.
  return "orbax" not in record.pathname and "orbax" not in text
