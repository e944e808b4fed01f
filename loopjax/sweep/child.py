"""Processes of a sweep: started with a log, told when to stop."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator, Sequence


class Stop:
  """Notices that the sweep is to stop, and tells the run that is under way.

  A run has a process group of its own: what stops it comes from here alone and
  so comes once. It saves at the first signal and would die of a second.

  Attributes:
    asked: whether a signal came.
  """

  def __init__(self):
    self.asked = False
    self._process = None

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Takes SIGTERM, Ctrl-C and a closed terminal while the block runs."""
    before = {
      which: signal.signal(which, self._note)
      for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
      if signal.getsignal(which) != signal.SIG_IGN  # As nohup does.
    }
    try:
      yield
    finally:
      for which, handler in before.items():
        signal.signal(which, handler)

  def wait(self, process: subprocess.Popen) -> int:
    """The exit status of a process, which gets the signals until it ends."""
    self._process = process
    if self.asked:  # Before there was a process to tell.
      process.terminate()
    status = process.wait()
    self._process = None
    return status

  def _note(self, which, frame):
    del frame
    self.asked = True
    if self._process is not None:
      ctrl_c = which == signal.SIGINT
      self._process.send_signal(signal.SIGINT if ctrl_c else signal.SIGTERM)


def run_command(
  command: Sequence[str], log: pathlib.Path, stop: Stop
) -> tuple[int, str]:
  """Runs a command and appends what it says to a log.

  Args:
    command: program and arguments.
    log: file.
    stop: passes signals on to the command.

  Returns:
    Its exit status, negative if a signal ended it, and the last line it said.
  """
  with log.open("a+", errors="replace") as file:
    before = file.seek(0, os.SEEK_END)
    with subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      process_group=0,
    ) as process:
      status = stop.wait(process)
    file.seek(before)
    said = file.read().strip().splitlines()
  return status, said[-1].strip() if said else ""
