"""Runs the items of a sweep, one or several at a time."""

import contextlib
import graphlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from loopjax import config as config_lib
from loopjax import sections
from loopjax.data import TASKS
from loopjax.errors import ExitStatus, UserError, note
from loopjax.run import preemption
from loopjax.run import workdir as workdir_lib
from loopjax.sweep.items import SweepItem


class StopRequest:
  """Records a request to stop the sweep and forwards it to the current runs.

  A run has its own process group: it receives signals only from this process,
  and each only once. It saves at the first signal and would be killed by a
  second.

  Attributes:
    received: whether the sweep is asked to stop.
  """

  def __init__(self) -> None:
    self.received = False
    self._processes: list[subprocess.Popen] = []
    # A signal may interrupt the handler of another one.
    self._lock = threading.RLock()

  def listening(self) -> contextlib.AbstractContextManager[Any]:
    """Handles the signals of `preemption.handled` while the block runs."""
    return preemption.handled(self._note)

  def wait(self, process: subprocess.Popen) -> int:
    """Waits for a process, forwarding signals; returns its exit status."""
    with self._lock:
      self._processes.append(process)
      if self.received:  # Received before the process started.
        process.terminate()
    status = process.wait()
    with self._lock:
      self._processes.remove(process)
    return status

  def send(self, signal_number: signal.Signals) -> None:
    """Asks all current runs, and those that begin now, to stop."""
    with self._lock:
      self.received = True
      for process in self._processes:
        process.send_signal(signal_number)

  def _note(self, signal_number: signal.Signals, _: Any) -> None:
    ctrl_c = signal_number == signal.SIGINT
    self.send(signal.SIGINT if ctrl_c else signal.SIGTERM)


Cores = set[int] | None  # The CPU cores that a run may use; None for all.


def split_cores(jobs: int) -> list[Cores]:
  """Splits the cores of this process between jobs, neighbours together.

  Prints a note where the system has no CPU affinity, for example on macOS.

  Returns:
    The cores of each job.
  """
  if jobs == 1:
    return [None]
  if not hasattr(os, "sched_getaffinity"):
    note("this system cannot bind a run to CPU cores: each run may use all")
    return [None] * jobs
  cores = sorted(os.sched_getaffinity(0))
  if jobs > len(cores):
    raise UserError(f"--jobs={jobs}: there are only {len(cores)} CPU cores")
  ends = [len(cores) * job // jobs for job in range(jobs + 1)]
  return [set(cores[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def run_command(
  command: Sequence[str],
  log: pathlib.Path,
  stop: StopRequest,
  cores: Cores = None,
) -> tuple[int, str]:
  """Runs a command on some CPU cores and appends its output to a log.

  Returns:
    The exit status, negative if a signal ended the command, and its last line
    of output.
  """
  with log.open("a+", encoding="utf-8", errors="replace") as file:
    before = file.seek(0, os.SEEK_END)
    with subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      process_group=0,
    ) as process:
      if cores is not None:
        # Before it starts threads, which inherit the cores. It may have ended.
        with contextlib.suppress(ProcessLookupError):
          os.sched_setaffinity(process.pid, cores)
      status = stop.wait(process)
    file.seek(before)
    lines = file.read().strip().splitlines()
  return status, lines[-1].strip() if lines else ""


def run_items(
  items: Sequence[SweepItem],
  workdir: pathlib.Path,
  arguments: Sequence[str],
  *,
  dry_run: bool = False,
  limit: int = 0,
  only: int | None = None,
  cores: Sequence[Cores] = (None,),
) -> tuple[dict[str, str], int]:
  """Runs incomplete items and prints one line per item, as it ends.

  Items that failed are named again at the end, on standard error.

  Args:
    items: from `make_items`.
    workdir: the sweep's work directory, with a directory and a log per item.
    arguments: arguments of loopjax.main common to all items.
    dry_run: only print the plan.
    limit: start at most this many; 0 for all.
    only: index of the only item to run; None for all.
    cores: from `split_cores`; as many items run at once.

  Returns:
    {slug: one-line message} of the items that failed, and the exit status.
  """
  order = _order(items, range(len(items)) if only is None else [only])
  ready: set[int] = set()
  running: dict[futures.Future, tuple[int, Cores]] = {}
  free, stop = list(cores), StopRequest()
  failed: dict[str, str] = {}
  started = stopped = 0

  def close(place: int, state: str, message: str) -> None:
    """Says how an item ended; those that wait for it may begin."""
    item = items[place]
    if message:
      failed[item.slug] = message
    words = [f"{place + 1}/{len(items)}", item.slug, state]
    words += [message] if message else _result(workdir / item.slug, item.config)
    print("  ".join(words), flush=True)
    order.done(place)

  with stop.listening(), futures.ThreadPoolExecutor(len(cores)) as pool:
    try:
      while running or (order.is_active() and not stopped):
        ready |= set(order.get_ready())
        if not ready or not free or stopped:
          for ended in futures.wait(running, None, "FIRST_COMPLETED").done:
            place, its_cores = running.pop(ended)
            free.append(its_cores)
            status, *lines = ended.result()
            close(place, *lines)
            if status and not stopped:
              stopped = status
              if not stop.received:
                stop.send(signal.SIGTERM)
          continue
        ready.remove(place := min(ready))
        item = items[place]
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
            its_cores = free.pop(0)
            run = pool.submit(_run, item, workdir, arguments, stop, its_cores)
            running[run] = place, its_cores
            continue
        close(place, state, message)
    except BaseException:  # The pool waits for its runs.
      stop.send(signal.SIGTERM)
      raise
  for slug, message in failed.items():
    print(f"failed: {slug}: {message}", file=sys.stderr)
  return failed, stopped or (ExitStatus.FAILED if failed else 0)


def _order(
  items: Sequence[SweepItem], places: Sequence[int]
) -> graphlib.TopologicalSorter[int]:
  """The order of some items.

  An item waits for those from which it starts, and for one with its directory.
  """
  order: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
  for number, place in enumerate(places):
    awaited = {items[place].slug, *items[place].needs}
    before = [x for x in places[:number] if items[x].slug in awaited]
    order.add(place, *before)
  order.prepare()
  return order


def item_arguments(
  arguments: Sequence[str], overrides: Mapping[str, Any]
) -> list[str]:
  """Arguments of `loopjax train`.

  Other families and tasks have other settings: they are named after --config's
  colon.
  """
  first, *others = arguments
  remaining = dict(overrides)
  for key in ("model.name", "task.name"):
    if name := remaining.pop(key, ""):
      has_more = sections.split_name(first)[1]
      first += f"{',' if has_more else ':'}{key}={name}"
  return [first, *others, *sections.flags(remaining)]


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
      has_config = (directory / "config.json").exists()
      return ("unfinished" if has_config else "new"), ""
    summary = workdir_lib.read_summary(directory)
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
  cores: Cores,
) -> tuple[int, str, str]:
  """Runs an item.

  Returns:
    The exit status if the sweep must stop, else 0; the item's state;
    if it failed, a one-line message.
  """
  directory, log = workdir / item.slug, workdir / f"{item.slug}.log"
  # Files of this folder, such as random.py, do not replace Python's modules.
  # In a clone, however, the package itself may be found only in this folder.
  in_clone = pathlib.Path(__file__).parents[2] == pathlib.Path.cwd()
  command = [
    sys.executable,
    *([] if in_clone else ["-P"]),
    "-m",
    "loopjax",
    "train",
    *item_arguments(arguments, item.overrides),
    f"--workdir={directory}",
  ]
  start = time.monotonic()
  status, last_line = run_command(command, log, stop, cores)
  if status == ExitStatus.STOPPED or (stop.received and status < 0):
    return ExitStatus.STOPPED, "preempted; the same command resumes it", ""
  if status == ExitStatus.LOST:
    return ExitStatus.LOST, "lost a process; the same command resumes it", ""
  stopped = ExitStatus.STOPPED if stop.received else 0
  state, message = _state(directory, item.config)
  if status == 0 and state == "complete":
    return stopped, f"done in {time.monotonic() - start:.0f} s", ""
  if status == ExitStatus.DIVERGED and state == "failed":
    return stopped, state, message
  if last_line.startswith("error: "):  # A self-explanatory message.
    return stopped, "failed", last_line.removeprefix("error: ")
  return stopped, "failed", f"exit status {status}: {last_line}; see {log}"


def _result(directory: pathlib.Path, config: Mapping[str, Any]) -> list[str]:
  """The task's first score on every split that has one, as text."""
  if not (directory / "summary.json").exists():
    return []
  summary = workdir_lib.read_summary(directory)
  score = TASKS[config["task"]["name"]].HEADLINE[0]
  words = [
    f"{name} {value:.3g}"
    for name, value in summary.get("metrics", {}).items()
    if name.partition("/")[2] == score and not name.startswith("train/")
  ]
  return [*words, f"{summary.get('wall_seconds', 0):.0f} s in total"]
