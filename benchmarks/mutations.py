"""Plants listed faults one at a time, and checks that tests fail.

  nice python benchmarks/mutations.py [--table=FILE] [--only=WORD,...] [--list]

`mutations.toml` lists faults that no random change of one operator, constant or
statement produces (see `mutants.py` for those), each with the tests that must
fail. A fault is planted in a copy of the working tree, never in the checkout,
and is caught if these tests pass without it and fail with it. The exit status
is 1 unless all are caught.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
TABLE = pathlib.Path(__file__).with_name("mutations.toml")
_PYTEST = ("-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider")
# Pytest's exit statuses; any other is an error in the table.
_RESULTS = {0: "passed", 1: "failed"}


class Mutation(NamedTuple):
  """A fault, and the tests that must fail.

  Attributes:
    breaks: description of the fault, the name of its row.
    file: the file to change.
    before: text that occurs in it exactly once.
    after: its replacement.
    tests: node ids or files; one of them must fail.
  """

  breaks: str
  file: str
  before: str
  after: str
  tests: Sequence[str]


def load(table: pathlib.Path = TABLE) -> list[Mutation]:
  """The rows of a table."""
  rows = tomllib.loads(table.read_text(encoding="utf-8"))
  return [Mutation(breaks, **row) for breaks, row in rows.items()]


def stale(mutation: Mutation, root: pathlib.Path = ROOT) -> str:
  """Why a row does not match the files below `root`; "" if it does."""
  count = _read(root / mutation.file).count(mutation.before)
  if count != 1:
    return f"{mutation.file} has {mutation.before!r} {count} times"
  for test in mutation.tests:
    file, _, name = test.partition("::")
    there = rf"^def {name.partition('[')[0]}\(" if name else "^def test_"
    if not re.search(there, _read(root / file), re.MULTILINE):
      return f"there is no test {test}"
  return ""


def judge(mutation: Mutation, root: pathlib.Path, seconds: float) -> str:
  """Plants a fault below `root`, runs its tests, and removes it.

  Returns:
    "caught", "missed", or an error.
  """
  if reason := stale(mutation, root):
    return f"stale: {reason}"
  path = root / mutation.file
  original = path.read_text(encoding="utf-8")
  path.write_text(
    original.replace(mutation.before, mutation.after), encoding="utf-8"
  )
  try:
    result = run_tests(mutation.tests, root, seconds)
  finally:
    path.write_text(original, encoding="utf-8")
  return {"failed": "caught", "passed": "missed"}.get(result, result)


def run_tests(tests: Iterable[str], root: pathlib.Path, seconds: float) -> str:
  """Runs tests below `root` in a separate process: "passed", "failed", ..."""
  # Bytecode could belong to a change of the same size and second.
  environment = {
    **os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"
  }  # fmt: skip
  with subprocess.Popen(
    [sys.executable, *_PYTEST, *tests],
    cwd=root,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  ) as process:
    try:
      output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      return f"not done after {seconds:.0f} s"
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Kills its children as well.
  status = process.returncode
  last = (output.strip() or "no output").splitlines()[-1]
  return _RESULTS.get(status, f"pytest ended with {status}: {last}")


def copy_tree(target: pathlib.Path) -> pathlib.Path:
  """Copies tracked and trackable files of the working tree."""
  command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
  listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
  for name in filter(None, listed.stdout.decode().split("\0")):
    if (ROOT / name).is_file():  # A deletion may be uncommitted.
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, target / name)
  return target


def _read(path: pathlib.Path) -> str:
  return path.read_text(encoding="utf-8") if path.is_file() else ""


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--only", default="", help="parts of rows' names or files"
  )
  parser.add_argument("--list", action="store_true", help="run nothing")
  parser.add_argument(
    "--table", type=pathlib.Path, default=TABLE, help="[mutations.toml]"
  )
  parser.add_argument("--timeout", type=float, default=300, help="seconds each")
  options = parser.parse_args()
  parts = options.only.split(",")
  mutations = [
    m
    for m in load(options.table)
    if any(part in m.breaks + m.file for part in parts)
  ]
  if not mutations:
    parser.error(f"--only={options.only}: no such row")
  if options.list:
    for mutation in mutations:
      print(f"{mutation.file}: {mutation.breaks}")
    return 0
  counts: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory(prefix="loopjax-mutations-") as name:
    tree = copy_tree(pathlib.Path(name))
    tests = dict.fromkeys(test for m in mutations for test in m.tests)
    without = run_tests(tests, tree, options.timeout * len(mutations))
    print(f"without a fault: {without}", flush=True)
    if without != "passed":
      return 1
    for mutation in mutations:
      start = time.monotonic()
      said = judge(mutation, tree, options.timeout)
      counts[said.partition(":")[0]] += 1
      seconds = f"{time.monotonic() - start:6.1f} s"
      print(f"{said} in {seconds}: {mutation.breaks}", flush=True)
  print(", ".join(f"{count} {word}" for word, count in counts.items()))
  return 0 if counts["caught"] == len(mutations) else 1


if __name__ == "__main__":
  sys.exit(main())
