"""Runs the experiments of PLAN.md, in its order, within a number of minutes.

  python benchmarks/device/plan.py list
  python benchmarks/device/plan.py next --minutes=9 --out=back

`next` installs the packages that are missing, runs the first experiment that is
not done, and goes on with the following ones while there is time. What the time
ends goes on with the same command. See PLAN.md. Needs Python alone.
"""

import argparse
import configparser
import gzip
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import NamedTuple, NoReturn

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
# Where the plan's commands write; --runs replaces it.
RUNS = "runs/plan/"
PART = 15 * 10**6
# Kept of a summary besides its metrics.
_KEPT = ("status", "steps", "wall_seconds", "parameters", "digest", "devices")
_SAVING = 40  # Seconds that commands have to save and end.
# Exit statuses of what is complete, preempted, or ended by a signal.
_ENDED = (0, 4, -signal.SIGTERM)
# Requirements of the package that no experiment imports, or that JAX brings.
_OTHERS = ("markdown-it-py", "pandas", "scipy")


def fail(message: str) -> NoReturn:
  """Ends the program with one line: a mistake by the user."""
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


class Parser(argparse.ArgumentParser):
  """Says only what is wrong."""

  def error(self, message: str) -> NoReturn:
    fail(message)


class Block(NamedTuple):
  """A paragraph of commands, which run side by side.

  Attributes:
    lines: the commands.
    toy: what --toy adds to the first of them, and only this runs; None if --toy
      leaves the block out.
  """

  lines: list[str]
  toy: str | None


class Experiment(NamedTuple):
  """A section of the plan: name and title of its heading, and its blocks."""

  name: str
  title: str
  blocks: list[Block]


def read(path: pathlib.Path) -> list[Experiment]:
  """The experiments of a plan, in order."""
  try:
    text = path.read_text("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    fail(f"{path}: {getattr(error, 'strerror', None) or error}")
  parts = re.split(r"(?m)^## \d+\. ", text)[1:]
  if not parts:
    fail(f"{path}: has no experiments, headings such as '## 1. name: title'")
  return [_experiment(part) for part in parts]


def _experiment(text: str) -> Experiment:
  head, _, body = text.partition("\n")
  name, _, title = head.partition(": ")
  # Prose, block, prose, block, prose.
  parts = re.split(r"(?m)((?:^ {4}\S.*\n?)+)", body)
  blocks = []
  for block, following in zip(parts[1::2], parts[2::2], strict=True):
    toy = re.search(r"(?s)At toy size: `(.*?)`", following)
    lines = [line.strip() for line in block.splitlines()]
    blocks.append(Block(lines, toy[1] if toy else None))
  return Experiment(name, title, blocks)


def words(line: str, options: argparse.Namespace, toy: str) -> list[str]:
  """A command of the plan, as this Python runs it."""
  found = [word.replace(RUNS, f"{options.runs}/") for word in shlex.split(line)]
  if options.toy:
    found = [
      re.sub(r"(--config=[^:]+):\w+", r"\1:smoke", word) for word in found
    ]
    found += shlex.split(toy)
  python = {"loopjax": [sys.executable, "-m", "loopjax"]}
  python["python"] = [sys.executable]
  place = next(i for i, word in enumerate(found) if word in python)
  # Settings of the environment precede the program.
  return ["env", *found[:place], *python[found[place]], *found[place + 1 :]]


def outputs(line: str, options: argparse.Namespace) -> list[pathlib.Path]:
  """Work directories, files of rows and traces that a command writes."""
  found = re.findall(r"--(?:workdir|rows|traces)=(\S+)", line)
  return [pathlib.Path(x.replace(RUNS, f"{options.runs}/")) for x in found]


def every_output(experiment: Experiment, options) -> list[pathlib.Path]:
  """The outputs of all commands of an experiment."""
  lines = [line for block in experiment.blocks for line in block.lines]
  return [path for line in lines for path in outputs(line, options)]


def completed(line: str, options) -> bool:
  """Whether a command is a run that is complete."""
  paths = outputs(line, options)
  runs = [path for path in paths if (path / "config.json").exists()]
  return bool(runs) and all(result(x)["status"] == "completed" for x in runs)


def rows_of(path: pathlib.Path) -> list[dict]:
  """The rows of a file; a killed run's last line may be incomplete."""
  return [json.loads(line) for line in _whole(path)]


def _whole(path: pathlib.Path) -> list[bytes]:
  data = path.read_bytes() if path.exists() else b""
  return [line for line in data.splitlines(True) if line.endswith(b"\n")]


def result(path: pathlib.Path):
  """What an output says: the summary of a run, or rows of JSON."""
  if path.suffix == ".jsonl":
    return rows_of(path)
  if (path / "summary.json").exists():
    summary = json.loads((path / "summary.json").read_text("utf-8"))
    found = {key: summary.get(key) for key in _KEPT}
    return found | {"metrics": summary["metrics"]}
  last = {row["split"]: row for row in rows_of(path / "metrics.jsonl")}
  return {"status": "open", "last": last}


def run(experiment: Experiment, options, end: float) -> dict:
  """Runs what is left of an experiment; stops at a time.

  Returns:
    Its row of the record, with a status: done, open (goes on) or failed.
  """
  started = time.monotonic()
  status, errors = "done", {}
  for number, block in enumerate(experiment.blocks):
    if options.toy and block.toy is None:
      continue
    lines = block.lines[:1] if options.toy else block.lines
    left = [line for line in lines if not completed(line, options)]
    log = options.runs / "logs" / f"{experiment.name}-{number}"
    codes, logs = together(left, log, block.toy or "", options, end)
    for line in left:
      if codes[line] not in _ENDED:
        errors[line] = {"exit": codes[line], "log": logs[line][-1500:]}
    if errors or any(codes.values()):
      status = "failed" if errors else "open"
      break
  found = {
    str(path.relative_to(options.runs)): result(path)
    for path in every_output(experiment, options)
    if "traces" not in path.name
  }
  commands = [line for block in experiment.blocks for line in block.lines]
  seconds = round(time.monotonic() - started, 1)
  row = {"experiment": experiment.name, "status": status, "seconds": seconds}
  row |= machine() | {"commands": commands, "found": found}
  return row | ({"errors": errors} if errors else {})


def together(lines, log: pathlib.Path, toy: str, options, end: float):
  """Runs commands side by side until a time: (exit status, log) by line."""
  log.parent.mkdir(parents=True, exist_ok=True)
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  share = 0.9 / max(1, len(lines))
  environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
  if options.toy:
    environment["JAX_PLATFORMS"] = "cpu"
  children, files = {}, {}
  try:
    for place, line in enumerate(lines):
      files[line] = log.with_name(f"{log.name}-{place}.log").open("ab")
      children[line] = subprocess.Popen(
        words(line, options, toy),
        cwd=ROOT,
        env=environment,
        stdout=files[line],
        stderr=subprocess.STDOUT,
      )
    while time.monotonic() < end and None in [
      child.poll() for child in children.values()
    ]:
      time.sleep(0.1)
  finally:
    _stop(children.values())
    for file in files.values():
      file.close()
  texts = {
    line: pathlib.Path(file.name).read_text("utf-8", "replace")
    for line, file in files.items()
  }
  return {line: child.returncode for line, child in children.items()}, texts


def _stop(children) -> None:
  """Asks processes to save and end; kills those that do not."""
  running = [child for child in children if child.poll() is None]
  for child in running:
    child.terminate()
  until = time.monotonic() + _SAVING
  for child in running:
    try:
      child.wait(max(1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
      child.kill()
      child.wait()


def machine() -> dict:
  """Hardware, versions and revision."""
  query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
  versions = {
    name: importlib.metadata.version(name)
    for name in ("jax", "jaxlib", "flax", "optax", "grain", "numpy")
  }
  return {
    "date": time.strftime("%Y-%m-%d %H:%M"),
    "gpus": _said([*query, "--format=csv,noheader"]),
    "cpus": os.cpu_count(),
    "python": platform.python_version(),
    "versions": versions,
    "revision": _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
  }


def _said(command: list[str]) -> str:
  """What a program prints, or "" if there is none such."""
  try:
    return subprocess.run(
      command, capture_output=True, text=True, check=True
    ).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return ""


def install() -> None:
  """Installs what experiments miss, from the folder wheels/ if there is one."""
  parser = configparser.ConfigParser()
  parser.read(ROOT / "setup.cfg", "utf-8")
  needed = parser["options"]["install_requires"].strip().split("\n")
  needed = [line for line in needed if not line.startswith(_OTHERS)]
  wheels = ROOT / "wheels"
  local = ["--no-index", f"--find-links={wheels}"] if wheels.exists() else []
  pip = [sys.executable, "-m", "pip", "install", "-q", *local]
  # The kernels' examples import pytest.
  done = subprocess.run(
    [*pip, *needed, "pytest"], stderr=subprocess.PIPE, text=True, check=False
  )
  if done.returncode:
    last = re.findall(r"(?m)^ERROR: (.*)", done.stderr) or [done.stderr.strip()]
    place = f"in {wheels}" if local else "by pip"
    fail(f"not all packages are found {place}: {last[-1]}")


class Parts:
  """A file for writing, in parts of at most `size` bytes."""

  def __init__(self, path: pathlib.Path, size: int):
    self.path, self.size, self.paths, self.file = path, size, [], None

  def write(self, data: bytes) -> int:
    view = memoryview(data)
    while len(view):
      if self.file is None or self.file.tell() == self.size:
        self.close()
        name = f"{self.path.name}.{len(self.paths):03d}"
        self.paths.append(self.path.with_name(name))
        self.file = self.paths[-1].open("wb")
      view = view[self.file.write(view[: self.size - self.file.tell()]) :]
    return len(data)

  def close(self) -> None:
    if self.file:
      self.file.close()


class Chain:
  """Files as one, for reading."""

  def __init__(self, paths):
    self.data = (path.read_bytes() for path in paths)
    self.left = b""

  def read(self, size: int) -> bytes:
    while len(self.left) < size and (more := next(self.data, b"")):
      self.left += more
    found, self.left = self.left[:size], self.left[size:]
    return found


def pack(experiment: Experiment, options, limit: int) -> tuple[list, str]:
  """Writes an experiment's work directories to --out, in parts.

  Each has its newest checkpoint, which a run continues from, unless these take
  more than `limit` bytes together.

  Returns:
    (parts, what was left out or "").
  """
  paths = [x for x in every_output(experiment, options) if x.exists()]
  saved = [x for path in paths for x in path.glob("checkpoints/*")]
  saved = [x for x in saved if x.name.isdigit()]  # Others are not complete.
  newest = {
    max((x for x in saved if x.parents[1] == path), key=_step)
    for path in {x.parents[1] for x in saved}
  }
  files = [file for x in newest for file in x.rglob("*") if file.is_file()]
  fits = sum(file.stat().st_size for file in files) <= limit
  names = {str(x.relative_to(options.runs)) for x in newest if fits}

  def chosen(info):
    found = re.match(r"(.*/checkpoints/[^/]+)", info.name)
    kept = found[1] in names if found else "/profile" not in info.name
    return info if kept else None

  parts = Parts(options.out / f"{experiment.name}.tar.gz", options.part)
  # Checkpoints are compressed already.
  with (
    gzip.GzipFile(mode="wb", fileobj=parts, compresslevel=1) as packed,
    tarfile.open(mode="w|", fileobj=packed) as tar,
  ):
    for path in paths:
      tar.add(path, str(path.relative_to(options.runs)), filter=chosen)
  parts.close()
  return parts.paths, "" if fits else "checkpoints"


def _step(checkpoint: pathlib.Path) -> int:
  return int(checkpoint.name)


def unpack(experiment: Experiment, options) -> None:
  """Brings back packed work directories that are not there."""
  parts = sorted(options.runs.glob(f"{experiment.name}.tar.gz.[0-9]*"))
  there = any(path.exists() for path in every_output(experiment, options))
  if parts and not there:
    with tarfile.open(mode="r|gz", fileobj=Chain(parts)) as tar:
      tar.extractall(options.runs, filter="data")


def record(options) -> list[dict]:
  """All rows: those of the repository, then those of --runs."""
  files = [options.plan.with_name("results.jsonl")]
  files += [options.runs / "results.jsonl"]
  rows = [row for file in files for row in rows_of(file)]
  return [row for row in rows if row.get("toy", False) == options.toy]


def states(options) -> dict[str, list[dict]]:
  """The rows of each experiment, by name."""
  rows = record(options)
  return {
    experiment.name: [x for x in rows if x["experiment"] == experiment.name]
    for experiment in read(options.plan)
  }


def show(options) -> int:
  """Prints every experiment and where it stands."""
  found = states(options)
  for experiment in read(options.plan):
    if options.only and experiment.name not in options.only:
      continue
    rows = found[experiment.name]
    seconds = sum(row["seconds"] for row in rows)
    state = rows[-1]["status"] if rows else "open"
    took = f", {seconds:.0f} s" if rows else ""
    print(f"{experiment.name:10} {state + took:16} {experiment.title}")
  return 0


def go_on(options) -> int:
  """Runs open experiments until the time is over; 1 if one failed."""
  began = time.monotonic()
  if not options.toy:
    install()
  last = 60 * options.minutes - min(2 * _SAVING, 10 * options.minutes)
  failed, room = False, 10**6 * options.megabytes
  options.out.mkdir(parents=True, exist_ok=True)
  for experiment in read(options.plan):
    rows = states(options)[experiment.name]
    named = experiment.name in options.only
    is_open = not rows or rows[-1]["status"] == "open"
    left = last - (time.monotonic() - began)
    if left <= 0 or not (named if options.only else is_open):
      continue
    print(f"{experiment.name}: {experiment.title}", flush=True)
    unpack(experiment, options)
    row = run(experiment, options, time.monotonic() + left)
    parts, left_out = pack(experiment, options, room)
    room -= sum(path.stat().st_size for path in parts)
    row |= {"left_out": left_out} if left_out else {}
    row |= {"toy": True} if options.toy else {}
    file = options.runs / "results.jsonl"
    size = sum(map(len, _whole(file)))
    with file.open("ab") as lines:
      lines.truncate(size)
      lines.write(json.dumps(row).encode() + b"\n")
    if options.out != options.runs:
      shutil.copy(file, options.out)
    failed |= row["status"] == "failed"
    print(json.dumps(row, indent=1), flush=True)
  return int(failed)


def main() -> int:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends commands.
  parser = Parser(description=__doc__.splitlines()[0])
  actions = {"list": show, "next": go_on}
  parser.add_argument("action", choices=actions)
  parser.add_argument("--minutes", type=float, default=9.0)
  parser.add_argument(
    "--only", nargs="+", default=[], help="names, done or not"
  )
  parser.add_argument("--runs", type=pathlib.Path, default=ROOT / RUNS)
  parser.add_argument("--out", type=pathlib.Path, help="what is to be kept")
  parser.add_argument("--megabytes", type=float, default=60, help="of --out")
  parser.add_argument("--part", type=int, default=PART, help="bytes of a part")
  parser.add_argument("--plan", type=pathlib.Path, default=HERE / "PLAN.md")
  parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
  options = parser.parse_args()
  known = [experiment.name for experiment in read(options.plan)]
  for name in options.only:
    if name not in known:
      fail(f"--only: {name} is none of {', '.join(known)}")
  for name in ("minutes", "part"):
    if not getattr(options, name) > 0:
      fail(f"--{name}={getattr(options, name):g}: must be positive")
  options.runs = options.runs.absolute()
  options.out = (options.out or options.runs).absolute()
  return actions[options.action](options)


if __name__ == "__main__":
  sys.exit(main())
