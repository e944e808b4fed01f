"""Hides the compilers' messages, which would swamp the report."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from loopjax.errors import UserError


@contextlib.contextmanager
def stderr() -> Iterator[None]:
  """Shows what is written to file descriptor 2 only if something fails."""
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as log:
    os.dup2(log.fileno(), 2)
    try:
      yield
    except UserError:
      raise
    except Exception:
      log.seek(0)
      os.write(saved, log.read())
      raise
    finally:
      sys.stderr.flush()
      os.dup2(saved, 2)
      os.close(saved)
