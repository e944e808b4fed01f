"""Requests to stop the run, from the machine or the user."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class Preempted(Exception):
  """Unwinds long work, such as an evaluation, to the trainer, which saves."""


class Notice:
  """Records whether the run was asked to stop.

  A single process is stopped by SIGTERM, Ctrl-C or the loss of its terminal; a
  second Ctrl-C kills it. SIGTERM may come several times, since some schedulers
  repeat it at the limit.
  With several processes JAX's own service handles SIGTERM, so that a signal to
  one stops all at the same step: no handler may be installed here.
  """

  def __init__(self):
    self._asked = self._listening = False
    self._polls = 0

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Handles the signals while the block, or one around it, runs."""
    on_main = threading.current_thread() is threading.main_thread()
    others = jax.distributed.is_initialized() or self._listening
    if others or not on_main:
      yield
      return
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {
      which: signal.getsignal(which)
      for which in signals
      if signal.getsignal(which) != signal.SIG_IGN  # Set by nohup.
    }

    def note(which, frame):
      del frame
      self._asked = True
      name = signal.Signals(which).name
      # Not print: it may be what the signal interrupted.
      line = f"{name}: saving and stopping; press Ctrl-C to stop at once\n"
      # Closed, of a notebook, or of a terminal that is gone.
      with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), line.encode())
      if signal.SIGINT in before:
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    for which in before:
      signal.signal(which, note)
    self._listening = True
    try:
      yield
    finally:
      self._listening = False
      for which, handler in before.items():
        signal.signal(which, handler)

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
