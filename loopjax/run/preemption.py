"""Requests to stop the run, from the machine or the user."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preempted(Exception):
  """Unwinds long work, such as an evaluation, to the trainer, which saves."""


_Handlers = Mapping[signal.Signals, Any]


@contextlib.contextmanager
def handled(
  note: Callable[[signal.Signals, _Handlers], None],
) -> Iterator[_Handlers]:
  """Handles SIGTERM, Ctrl-C and the loss of the terminal in the block.

  `note` is called with the signal and the earlier handlers, which the block
  gets too.

  Only the main thread of a program can: elsewhere it handles none. Signals that
  are ignored, as with nohup, stay so.
  """
  on_main = threading.current_thread() is threading.main_thread()
  signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if on_main else ()
  before = {
    which: signal.getsignal(which)
    for which in signals
    if signal.getsignal(which) != signal.SIG_IGN
  }
  for which in before:
    signal.signal(which, lambda number, _: note(signal.Signals(number), before))
  try:
    yield before
  finally:
    for which, handler in before.items():
      signal.signal(which, handler)


class Notice:
  """Records whether the run was asked to stop.

  A single process is stopped by SIGTERM, Ctrl-C or the loss of its terminal; a
  second Ctrl-C kills it. SIGTERM may come several times, since some schedulers
  repeat it at the limit.
  With several processes JAX's own service handles SIGTERM, so that a signal to
  one stops all at the same step: no handler may be installed here.
  """

  def __init__(self):
    self._asked = False
    self._polls = 0

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Handles the signals while the block runs."""
    if jax.distributed.is_initialized():
      yield
      return
    with handled(self._note):
      yield

  def _note(self, which: signal.Signals, before: _Handlers) -> None:
    self._asked = True
    # Not print: it may be what the signal interrupted.
    line = f"{which.name}: saving and stopping; press Ctrl-C to stop at once\n"
    # Closed, of a notebook, or of a terminal that is gone.
    with contextlib.suppress(AttributeError, OSError, ValueError):
      os.write(sys.stderr.fileno(), line.encode())
    if signal.SIGINT in before:
      signal.signal(signal.SIGINT, before[signal.SIGINT])

  def reached(self) -> bool:
    """Whether to stop now; all processes must call this equally often."""
    if jax.distributed.is_initialized():
      self._polls += 1
      point = multihost_utils.reached_preemption_sync_point(self._polls)
      self._asked = self._asked or point  # A sync point is true only once.
    return self._asked

  def check(self) -> None:
    """Raises Preempted if it is time to stop."""
    if self.reached():
      raise Preempted
