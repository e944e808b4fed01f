"""Mutation testing: breaks the code one line at a time; do the tests fail?

  nice python benchmarks/mutations.py [--only=NAME,...] [--list] [--jobs=1]

`mutations.toml` lists the changes, each with the tests that must fail. A change
is made in a copy of the working tree, never in the checkout, and counts as
caught if these tests pass without it and fail with it. One whose old text is
not in its file exactly once, or whose tests are gone, is stale. The exit
status is 1 unless all are caught. All of them take about half an hour on one
CPU core.
"""

import argparse
import collections
import compileall
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
TABLE = pathlib.Path(__file__).with_name("mutations.toml")
_PYTEST = ("-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider")
# Meaning of pytest's exit status; any other is an error of the table.
_RESULTS = {0: "passed", 1: "failed"}


class Mutation(NamedTuple):
  """A change, and the tests that must fail.

  Attributes:
    name: AREA/WHAT.
    file: the file to change.
    before: text that occurs in it exactly once.
    after: what replaces it.
    tests: node ids, or files; one of them must fail.
    why: what is wrong with the change.
    tier: "long" if `pytest` runs none of the tests, but `.ci/run` or a person.
  """

  name: str
  file: str
  before: str
  after: str
  tests: Sequence[str]
  why: str
  tier: str = ""


def load(table: pathlib.Path = TABLE) -> list[Mutation]:
  """The rows of a table."""
  rows = tomllib.loads(table.read_text())["mutation"]
  return [Mutation(**row) for row in rows]


def stale(mutation: Mutation, root: pathlib.Path = ROOT) -> str:
  """Why a row does not fit the files below `root`; "" if it does."""
  count = _read(root / mutation.file).count(mutation.before)
  if count != 1:
    return f"{mutation.file} has {mutation.before!r} {count} times"
  for test in mutation.tests:
    file, _, name = test.partition("::")
    there = rf"^def {name.partition('[')[0]}\(" if name else "^def test_"
    if not re.search(there, _read(root / file), re.MULTILINE):
      return f"there is no test {test}"
  return ""


def without_quick_tests(mutations: Sequence[Mutation]) -> list[str]:
  """Names of the rows that have no test among those that `pytest` runs."""
  files = {test.partition("::")[0] for row in mutations for test in row.tests}
  listed = subprocess.run(
    [sys.executable, *_PYTEST, "-v", "--collect-only", *sorted(files)],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout.splitlines()
  quick = {
    name
    for test in listed
    for name in (test, test.partition("[")[0], test.partition("::")[0])
  }
  return [row.name for row in mutations if not quick.intersection(row.tests)]


def judge(mutation: Mutation, root: pathlib.Path, seconds: float) -> str:
  """Makes a change below `root`, runs its tests, and reverts it.

  Returns:
    "caught", "missed", or what went wrong.
  """
  path = root / mutation.file
  original = path.read_text()
  path.write_text(original.replace(mutation.before, mutation.after))
  try:
    result = run_tests(mutation.tests, root, seconds, mutation.tier)
  finally:
    path.write_text(original)
  return {"failed": "caught", "passed": "missed"}.get(result, result)


def control(
  test_sets: Sequence[Sequence[str]],
  root: pathlib.Path,
  seconds: float,
  tier: str = "",
) -> dict[tuple[str, ...], str]:
  """Tests that do not pass without a change, and their results.

  All run in one process, and one by one only if that does not pass.
  """
  distinct = list(dict.fromkeys(map(tuple, test_sets)))
  tests = list(dict.fromkeys(itertools.chain.from_iterable(distinct)))
  start = time.monotonic()
  limit = seconds * len(distinct)
  together = run_tests(tests, root, limit, tier) if tests else ""
  took = time.monotonic() - start
  print(f"without a change: {together} in {took:.0f} s", flush=True)
  if together in ("", "passed"):
    return {}
  results = {each: run_tests(each, root, seconds, tier) for each in distinct}
  return {each: said for each, said in results.items() if said != "passed"}


def run_tests(
  tests: Sequence[str], root: pathlib.Path, seconds: float, tier: str = ""
) -> str:
  """Runs tests below `root` in a separate process: "passed", "failed", ...

  Only those that `pytest` runs, or with tier="long" those with any marker.
  """
  # A compiled file could belong to a change of the same size and second.
  environment = {
    **os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"
  }  # fmt: skip
  with subprocess.Popen(
    [sys.executable, *_PYTEST, *(("-m", "") if tier == "long" else ()), *tests],
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
  """Copies what git tracks or would track, as it is in the working tree."""
  command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
  listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
  for name in filter(None, listed.stdout.decode().split("\0")):
    if (ROOT / name).is_file():  # It may be deleted and not yet committed.
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, target / name)
  compileall.compile_dir(target / "loopjax", quiet=1)
  return target


def try_all(
  mutations: Sequence[Mutation], tmp: pathlib.Path, jobs: int, seconds: float
) -> collections.Counter[str]:
  """Prints a line for every mutation; returns the count of each verdict."""
  trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
  for job in range(jobs):
    trees.put(copy_tree(tmp / str(job)))

  def in_a_tree(function, *arguments) -> tuple[str, float]:
    tree, start = trees.get(), time.monotonic()
    try:
      return function(*arguments, tree, seconds), time.monotonic() - start
    finally:
      trees.put(tree)

  reasons = {m.name: stale(m, tmp / "0") for m in mutations}
  unfit = {}
  for tier in sorted({m.tier for m in mutations}):
    fitting = [m for m in mutations if m.tier == tier and not reasons[m.name]]
    tests = [m.tests for m in fitting]
    failed = control(tests, tmp / "0", seconds, tier)
    unfit |= {
      m.name: said for m in fitting if (said := failed.get(tuple(m.tests)))
    }

  def verdict(mutation: Mutation) -> tuple[str, float]:
    if reason := reasons[mutation.name]:
      return f"stale: {reason}", 0.0
    if reason := unfit.get(mutation.name):
      return f"unfit: without the change its tests {reason}", 0.0
    return in_a_tree(judge, mutation)

  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    counts: collections.Counter[str] = collections.Counter()
    for mutation, (said, took) in zip(
      mutations, pool.map(verdict, mutations), strict=True
    ):
      word, _, detail = said.partition(": ")
      counts[word] += 1
      line = f"{word:8}{took:6.1f} s  {mutation.name}"
      detail = detail or ("" if word == "caught" else mutation.why)
      print(f"{line}: {detail}" if detail else line, flush=True)
  return counts


def _read(path: pathlib.Path) -> str:
  return path.read_text() if path.is_file() else ""


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", default="", help="names, or parts of them")
  parser.add_argument("--list", action="store_true", help="run nothing")
  parser.add_argument("--jobs", type=int, default=1, help="at the same time")
  parser.add_argument("--timeout", type=float, default=300, help="seconds each")
  options = parser.parse_args()
  parts = options.only.split(",")
  mutations = [m for m in load() if any(part in m.name for part in parts)]
  if not mutations:
    parser.error(f"--only={options.only}: no such mutation")
  if options.list:
    for mutation in mutations:
      print(f"{mutation.name}: {mutation.why} ({mutation.file})")
    return 0
  with tempfile.TemporaryDirectory(prefix="loopjax-mutations-") as name:
    counts = try_all(
      mutations, pathlib.Path(name), options.jobs, options.timeout
    )
  said = ", ".join(f"{count} {word}" for word, count in counts.items())
  print(f"{len(mutations)} mutations: {said}")
  return 0 if counts["caught"] == len(mutations) else 1


if __name__ == "__main__":
  sys.exit(main())
