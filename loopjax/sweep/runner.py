"""Runs the items of a sweep, one after another."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loopjax import config as config_lib
from loopjax import sections
from loopjax.data import TASKS
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib
from loopjax.sweep.items import SweepItem


class StopRequest:
  """Records a request to stop the sweep and forwards it to the current run.

  A run has its own process group: it receives signals only from this process,
  and only once. It saves at the first signal and would be killed by a second.

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
      if signal.getsignal(which) != signal.SIG_IGN  # Set by nohup.
    }
    try:
      yield
    finally:
      for which, handler in before.items():
        signal.signal(which, handler)

  def wait(self, process: subprocess.Popen) -> int:
    """Waits for a process, forwarding signals; returns its exit status."""
    self._process = process
    if self.received:  # Received before the process started.
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


_DIVERGED, _PREEMPTED, _LOST = 3, 4, 5  # Exit statuses of loopjax.main.


def run_items(
  items: Sequence[SweepItem],
  workdir: pathlib.Path,
  arguments: Sequence[str],
  *,
  dry_run: bool = False,
  limit: int = 0,
  only: int | None = None,
) -> tuple[dict[str, str], int]:
  """Runs incomplete items and prints one line per item.

  Args:
    items: from `make_items`.
    workdir: the sweep's work directory, with a directory and a log per item.
    arguments: arguments of loopjax.main common to all items.
    dry_run: only print the plan.
    limit: start at most this many; 0 for all.
    only: index of the only item to run; None for all.

  Returns:
    {slug: one-line message} of the items that failed, and the exit status.
  """
  failed, started, stopped, stop = {}, 0, 0, StopRequest()
  with stop.listening():
    for number, item in enumerate(items, 1):
      if only not in (None, number - 1):
        continue
      state, message = _state(workdir / item.slug, item.config)
      if state in ("new", "unfinished"):
        started += 1
        if limit and started > limit:
          state = f"{state}, skipped by --limit"
        elif dry_run:
          state = f"{state}, would run"
        elif missing := _missing(item, items, workdir):
          state, message = "failed", f"needs {missing}, which is not complete"
        else:
          stopped, state, message = _run(item, workdir, arguments, stop)
      if message:
        failed[item.slug] = message
      words = [f"{number}/{len(items)}", item.slug, state]
      words += (
        [message] if message else _result(workdir / item.slug, item.config)
      )
      print("  ".join(words), flush=True)
      if stopped:
        return failed, stopped
  return failed, 1 if failed else 0


def item_arguments(
  arguments: Sequence[str], overrides: Mapping[str, Any]
) -> list[str]:
  """Arguments of loopjax.main.

  Other families and tasks have other settings: they are named after --config's
  colon.
  """
  first, *others = arguments
  rest = dict(overrides)
  for key in ("model.name", "task.name"):
    if name := rest.pop(key, ""):
      first += f"{',' if ':' in first else ':'}{key}={name}"
  return [first, *others, *sections.flags(rest)]


def _missing(
  item: SweepItem, items: Sequence[SweepItem], workdir: pathlib.Path
) -> str:
  """The first incomplete run on which an item depends, or ""."""
  for other in (x for x in items if x.slug in item.needs):
    if _state(workdir / other.slug, other.config)[0] != "complete":
      return other.slug
  return ""


def _state(
  directory: pathlib.Path, config: Mapping[str, Any]
) -> tuple[str, str]:
  """(state, message): "new", "unfinished", "complete" or "failed".

  Only a failed item has a message.
  """
  try:
    config_lib.check_config(directory, config, "train_and_eval")
    if not (directory / "summary.json").exists():
      there = (directory / "config.json").exists()
      return ("unfinished" if there else "new"), ""
    summary = workdir_lib.read_json(directory / "summary.json")
  except UserError as error:
    return "failed", str(error)
  if summary.get("status") == "diverged":  # A rerun would diverge again.
    reason = summary.get("reason") or "training diverged"
    again = f"remove {directory / 'summary.json'} to run it again"
    return "failed", f"{reason}; {again}"
  complete = summary.get("status") == "completed"
  return ("complete" if complete else "unfinished"), ""


def _run(
  item: SweepItem,
  workdir: pathlib.Path,
  arguments: Sequence[str],
  stop: StopRequest,
) -> tuple[int, str, str]:
  """Runs an item.

  Returns:
    The exit status if the sweep must stop, else 0; the item's state;
    if it failed, a one-line message.
  """
  directory, log = workdir / item.slug, workdir / f"{item.slug}.log"
  command = [
    sys.executable,
    "-m",
    "loopjax.main",
    *item_arguments(arguments, item.overrides),
    f"--workdir={directory}",
  ]
  start = time.monotonic()
  status, last_line = run_command(command, log, stop)
  if status == _PREEMPTED or (stop.received and status < 0):
    return _PREEMPTED, "preempted; the same command resumes it", ""
  if status == _LOST:
    return _LOST, "lost a process; the same command resumes it", ""
  stopped = _PREEMPTED if stop.received else 0
  state, message = _state(directory, item.config)
  if status == 0 and state == "complete":
    return stopped, f"done in {time.monotonic() - start:.0f} s", ""
  if status == _DIVERGED and state == "failed":
    return stopped, state, message
  if last_line.startswith("error: "):  # A self-explanatory message.
    return stopped, "failed", last_line.removeprefix("error: ")
  return stopped, "failed", f"exit status {status}: {last_line}; see {log}"


def _result(directory: pathlib.Path, config: Mapping[str, Any]) -> list[str]:
  """The task's first score on every split that has one, as text."""
  if not (directory / "summary.json").exists():
    return []
  summary = workdir_lib.read_json(directory / "summary.json")
  score = TASKS[config["task"]["name"]].HEADLINE[0]
  words = [
    f"{name} {value:.3g}"
    for name, value in summary.get("metrics", {}).items()
    if name.partition("/")[2] == score and not name.startswith("train/")
  ]
  return [*words, f"{summary.get('wall_seconds', 0):.0f} s in total"]
