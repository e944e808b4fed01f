"""Child processes of a sweep: started with a log, and stopped by signals."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator, Sequence


class StopRequest:
  """Records a request to stop the sweep, and passes it to the current run.

  A run has its own process group, so that it receives signals only from this
  process, and only once: it saves at the first and would die at a second.

  Attributes:
    received: whether a signal was received.
  """

  def __init__(self):
    self.received = False
    self._process = None

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Handles SIGTERM, SIGINT and SIGHUP while the block runs."""
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
    """Waits for a process, forwarding signals; returns its exit status."""
    self._process = process
    if self.received:  # The signal arrived before the process was started.
      process.terminate()
    status = process.wait()
    self._process = None
    return status

  def _note(self, which, frame):
    del frame
    self.received = True
    if self._process is not None:
      ctrl_c = which == signal.SIGINT
      self._process.send_signal(signal.SIGINT if ctrl_c else signal.SIGTERM)


def run_command(
  command: Sequence[str], log: pathlib.Path, stop: StopRequest
) -> tuple[int, str]:
  """Runs a command and appends its output to a log.

  Args:
    command: program and arguments.
    log: path of the log.
    stop: forwards signals to the command.

  Returns:
    The exit status, negative if a signal ended the command, and its last line
    of output.
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
