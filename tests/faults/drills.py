"""Faults injected into real runs, in separate processes.

Every drill takes an empty directory, raises AssertionError if a guarantee does
not hold, and returns one line that describes the drill. The tests run them
briefly; `benchmarks/fault_drill.py` at length.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from loopjax.errors import ExitStatus

ROOT = pathlib.Path(__file__).parents[2]
# Small, long enough to be interrupted at many places, and with every feature.
CONFIG = (
  "--config=configs/sudoku_utm.py:smoke,run.num_steps=120,run.log_every=10,"
  "run.checkpoint_every=20,run.keep_best=1,eval.every=40,eval.num_examples=64,"
  "optim.ema_decay=0.9,eval.depth_factor=0"
)
# Rates differ from run to run.
TIMINGS = (
  "steps_per_second", "examples_per_second", "data_wait_fraction",
  "model_flops_per_second", "model_flops_utilization", "peak_memory_bytes",
)  # fmt: skip
_started: list[subprocess.Popen] = []


def environment(num_devices: int = 1) -> dict[str, str]:
  """Environment of a run on virtual CPU devices."""
  cache = os.environ.get(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(tempfile.gettempdir()) / "loopjax-test-compilation"),
  )
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(num_devices),
    "JAX_COMPILATION_CACHE_DIR": cache,
    "PYTHONPATH": str(ROOT),
  }


def start(
  workdir: pathlib.Path, *arguments: str, config: str = CONFIG, devices: int = 1
) -> subprocess.Popen:
  """Starts `loopjax.main`; its output goes to a pipe."""
  command = [sys.executable, "-m", "loopjax.main", config]
  process = subprocess.Popen(
    [*command, f"--workdir={workdir}", *arguments],
    cwd=ROOT,
    env=environment(devices),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  _started.append(process)
  return process


def end_all() -> None:
  """Kills the processes of a failed drill."""
  while _started:
    with _started.pop() as process:
      process.kill()


def run(
  workdir: pathlib.Path, *arguments: str, status: int = 0, **options
) -> str:
  """Runs to the end and returns the output."""
  process = start(workdir, *arguments, **options)
  said = process.communicate()[0]
  assert process.returncode == status, (process.returncode, said[-3000:])
  return said


def start_group(
  workdir: pathlib.Path, count: int, *arguments: str, **options
) -> list[subprocess.Popen]:
  """Starts the processes of one run on the loopback interface."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  return [
    start(
      workdir,
      f"--coordinator_address=127.0.0.1:{port}",
      f"--num_processes={count}",
      f"--process_id={index}",
      *arguments,
      **options,
    )
    for index in range(count)
  ]


def finish(processes: Sequence[subprocess.Popen], statuses) -> list[str]:
  """Waits for processes and checks how they ended."""
  said = [process.communicate()[0] for process in processes]
  ended = [process.returncode for process in processes]
  for status, text in zip(ended, said, strict=True):
    assert status in statuses, (ended, text[-3000:])
  return said


def summary(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / "summary.json").read_text())


def rows(workdir: pathlib.Path) -> list[dict]:
  """Rows of metrics.jsonl without timings; every line must be whole."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if k not in TIMINGS}
    for line in lines
  ]


def assert_same_run(workdir: pathlib.Path, other: pathlib.Path) -> None:
  """Parameters, EMA, optimizer and every row are equal to the bit."""
  assert summary(workdir)["status"] == "completed"
  assert summary(workdir)["digest"] == summary(other)["digest"]
  got, expected = rows(workdir), rows(other)
  assert [(r["step"], r["split"]) for r in got] == [
    (r["step"], r["split"]) for r in expected
  ]
  assert got == expected


def wait_for(process: subprocess.Popen, condition, seconds=240.0) -> bool:
  """Whether a condition came true before the process ended."""
  deadline = time.monotonic() + seconds
  while process.poll() is None:
    assert time.monotonic() < deadline, "nothing happened"
    if condition():
      return True
    time.sleep(0.001)
  return False


def checkpoints(workdir: pathlib.Path) -> list[int]:
  directory = workdir / "checkpoints"
  names = [p.name for p in directory.glob("*")] if directory.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


def saving(workdir: pathlib.Path) -> bool:
  """Whether a save is under way."""
  return any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def size(workdir: pathlib.Path) -> int:
  """Bytes of metrics.jsonl."""
  path = workdir / "metrics.jsonl"
  return path.stat().st_size if path.exists() else 0


def has_grown(workdir: pathlib.Path, before: int) -> bool:
  return size(workdir) > before


# The drills.


def sigkill(
  tmp: pathlib.Path, never_killed: pathlib.Path, kills: int, seed: int = 0
) -> str:
  """Killed during a save, at a random moment, and so on; and started again."""
  draw, during_save, done = random.Random(seed), 0, 0
  workdir = tmp / "killed"
  while done < kills:
    process = start(workdir)
    if not done % 2:
      during_save += wait_for(process, lambda: saving(workdir))
    else:
      wait_for(process, functools.partial(has_grown, workdir, size(workdir)))
      time.sleep(draw.uniform(0, 0.4))
    process.kill()
    process.communicate()
    done += 1
    if (workdir / "summary.json").exists():
      # Finished before the signal: begin again, to continue killing.
      assert_same_run(workdir, never_killed)
      shutil.rmtree(workdir)
  run(workdir)
  assert_same_run(workdir, never_killed)
  assert during_save >= kills / 4
  return f"{kills} kills, {during_save} during a save; bit-identical"


def sigterm(tmp: pathlib.Path, never_killed: pathlib.Path) -> str:
  """Asked to stop between two log rows, and started again."""
  workdir = tmp / "preempted"
  process = start(workdir)
  wait_for(process, lambda: size(workdir) > 0)
  process.send_signal(signal.SIGTERM)
  said = process.communicate()[0]
  assert process.returncode == 4, said[-3000:]
  stopped = summary(workdir)
  assert stopped["status"] == "preempted"
  assert stopped["steps"] in checkpoints(workdir)
  run(workdir)
  assert_same_run(workdir, never_killed)
  return f"saved at step {stopped['steps']}, status 4; bit-identical"


def _file(step: pathlib.Path, seed: int) -> pathlib.Path:
  """One of a checkpoint's files: even seeds pick among those with arrays."""
  files = sorted(path for path in step.rglob("*") if path.stat().st_size)
  files = [path for path in files if path.is_file()]
  arrays = [path for path in files if path.parent.name == "d"]
  assert arrays
  files = files if seed % 2 else arrays
  sizes = [path.stat().st_size for path in files]
  return random.Random(seed).choices(files, sizes)[0]


def truncate(step: pathlib.Path, seed: int) -> None:
  path = _file(step, seed)
  with path.open("r+b") as file:
    file.truncate(path.stat().st_size // 2)


def flip(step: pathlib.Path, seed: int) -> None:
  """Changes one bit."""
  path = _file(step, seed)
  content = bytearray(path.read_bytes())
  place = random.Random(seed).randrange(len(content))
  content[place] ^= 1 << (place % 8)
  path.write_bytes(bytes(content))


def remove_file(step: pathlib.Path, seed: int) -> None:
  _file(step, seed).unlink()


def empty(step: pathlib.Path, seed: int = 0) -> None:
  del seed
  for path in step.iterdir():
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def edit_record(step: pathlib.Path, seed: int) -> None:
  """Changes the checkpoint's number of consumed batches."""
  del seed
  path = step / "meta" / "metadata"
  text = path.read_text()
  assert '"batches": 120' in text
  path.write_text(text.replace('"batches": 120', '"batches": 119'))


DAMAGES = (truncate, flip, empty, remove_file, edit_record)


def damage(
  tmp: pathlib.Path, never_killed: pathlib.Path, how, seed: int
) -> str:
  """The newest checkpoint is damaged; the run falls back and reports it."""
  workdir = tmp / f"damaged-{how.__name__}-{seed}"
  shutil.copytree(never_killed, workdir)
  (workdir / "summary.json").unlink()
  newest = checkpoints(workdir)[-1]
  how(workdir / "checkpoints" / str(newest), seed)
  said = run(workdir)
  line = [x for x in said.splitlines() if "is skipped" in x]
  if line:
    assert f"checkpoint {newest} is skipped" in line[0]
    assert [p.name for p in (workdir / "damaged").iterdir()] == [f"{newest}.0"]
  # Otherwise the bit was unused, and the loaded state is still correct.
  assert_same_run(workdir, never_killed)
  return line[0] if line else "nothing depended on it; loaded right"


def damage_all(tmp: pathlib.Path, never_killed: pathlib.Path) -> str:
  """No checkpoint is intact: refused, and not restarted from scratch."""
  workdir = tmp / "damaged-all"
  shutil.copytree(never_killed, workdir)
  (workdir / "summary.json").unlink()
  for step in checkpoints(workdir):
    empty(workdir / "checkpoints" / str(step))
  said = run(workdir, status=2)
  (line,) = [x for x in said.splitlines() if x.startswith("error: ")]
  assert "cannot resume: all checkpoints" in line
  assert line in run(workdir, status=2)  # And so is the next start.
  return line


@contextlib.contextmanager
def small_disk(directory: pathlib.Path, kibibytes: int) -> Iterator[None]:
  """A separate file system; raises OSError if mounting is not allowed."""
  directory.mkdir(parents=True)
  mounted = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", directory],
    capture_output=True,
    check=False,
  )
  if mounted.returncode:
    raise OSError(mounted.stderr.decode().strip())
  try:
    yield
  finally:
    subprocess.run(["umount", "-l", directory], check=False)


def disk_full(tmp: pathlib.Path, never_killed: pathlib.Path) -> str:
  """The disk fills up during a save; with free space again the run resumes."""
  disk = tmp / "disk"
  with small_disk(disk, 16 * 1024):
    workdir = disk / "run"
    process = start(workdir)
    wait_for(process, lambda: len(checkpoints(workdir)) >= 1)
    with contextlib.suppress(OSError):
      (disk / "ballast").write_bytes(bytes(64 * 2**20))
    said = process.communicate()[0]
    assert process.returncode == 2, said[-3000:]
    # It may appear within a line printed by another thread.
    assert said.count("error: ") == 1 and "Traceback" not in said, said[-3000:]
    (disk / "ballast").unlink()
    assert checkpoints(workdir)
    run(workdir)
    assert_same_run(workdir, never_killed)
  return "error: " + said.split("error: ")[1].splitlines()[0]


def read_only(tmp: pathlib.Path) -> str:
  """A directory that cannot be created, because a file is in its place."""
  (tmp / "file").write_text("")
  said = run(tmp / "file" / "run", status=2)
  (line,) = [x for x in said.splitlines() if x.startswith("error: ")]
  assert "cannot be written" in line
  return line


def second_run(tmp: pathlib.Path) -> str:
  """Two runs in one directory at the same time: the second is refused."""
  workdir = tmp / "shared"
  first = start(workdir)
  wait_for(first, lambda: (workdir / "config.json").exists())
  said = run(workdir, status=2)
  assert first.poll() is None, "the first one ended too early"
  first.kill()
  first.communicate()
  (line,) = [x for x in said.splitlines() if x.startswith("error: ")]
  assert "another run is using it" in line
  return line


def processes(
  tmp: pathlib.Path, never_killed: pathlib.Path, count: int, then: int
) -> str:
  """Several processes; one is killed; as many or others resume."""
  workdir = tmp / f"group-{count}-{then}"
  group = start_group(workdir, count)
  assert wait_for(group[0], lambda: len(checkpoints(workdir)) >= 2)
  began = time.monotonic()
  group[-1].kill()
  group[-1].communicate()
  said = finish(group[:-1], {5, -signal.SIGABRT})
  seconds = time.monotonic() - began
  assert seconds < 60, seconds
  if group[0].returncode == ExitStatus.LOST:  # What ends first is judged.
    assert seconds > 2, seconds
  # The first words come from us, from JAX's service or from its transport.
  words = ("another process", "coordination", "gloo")
  for text in said:
    assert any(word in text for word in words), text
  last = checkpoints(workdir)[-1]
  assert not (workdir / "summary.json").exists()
  said = finish(start_group(workdir, then), {0})
  assert f"resuming after step {last} of " in said[0], said[0][-3000:]
  assert_close_run(workdir, never_killed)
  return (
    f"{count} processes, one killed, the others stopped in {seconds:.0f} s;"
    f" {then} went on after step {last}; same losses"
  )


def group_sigterm(
  tmp: pathlib.Path, never_killed: pathlib.Path, count: int
) -> str:
  """One of several processes is asked to stop: all save the same step."""
  workdir = tmp / f"group-sigterm-{count}"
  group = start_group(workdir, count)
  wait_for(group[0], lambda: size(workdir) > 0)
  group[-1].send_signal(signal.SIGTERM)
  finish(group, {4})
  stopped = summary(workdir)
  assert stopped["status"] == "preempted"
  assert stopped["steps"] in checkpoints(workdir)
  run(workdir)
  assert_close_run(workdir, never_killed)
  return f"{count} processes saved step {stopped['steps']}; one went on"


def assert_close_run(workdir: pathlib.Path, other: pathlib.Path) -> None:
  """The same rows up to the order of additions."""
  got, expected = rows(workdir), rows(other)
  assert [(r["step"], r["split"]) for r in got] == [
    (r["step"], r["split"]) for r in expected
  ]
  for row, reference in zip(got, expected, strict=True):
    assert row.keys() == reference.keys()
    assert abs(row["loss"] - reference["loss"]) < 2e-3, (row, reference)
